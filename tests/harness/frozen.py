"""The last import of the fork server. Garbage collections of its forks skip all objects that exist by then."""

import contextlib
import gc

with contextlib.suppress(ImportError):  # transformers compiles a thousand patterns at the first model that is read
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
