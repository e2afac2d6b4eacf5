"""``Muon``: orthogonalizes each matrix on one rank."""

from fsdp2x.optim.muon.groups import muon_param_groups, named_matrices
from fsdp2x.optim.muon.optimizer import Muon

__all__ = ["Muon", "muon_param_groups", "named_matrices"]
