"""The last import of the fork server: what is there by then is no work, and no pages, for collections of its forks."""

import contextlib
import gc

with contextlib.suppress(ImportError):  # transformers compiles a thousand patterns at the first model that is read
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
