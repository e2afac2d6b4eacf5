"""The last import of the fork server: what is there by then is no work, and no pages, for collections of its forks."""

import gc

gc.collect()
gc.freeze()
