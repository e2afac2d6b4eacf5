"""The last import of the fork server. Garbage collections of its forks skip all objects that exist by then."""

import atexit
import contextlib
import gc
import os

with contextlib.suppress(ImportError):  # transformers compiles a thousand patterns at the first model that is read
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()

server = os.getpid()
# Ends the server, not its forks, without reports on what is frozen.
atexit.register(lambda: os.getpid() == server and os._exit(0))
