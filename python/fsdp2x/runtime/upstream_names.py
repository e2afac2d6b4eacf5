"""Upstream's private names for a unit's state, read-only and as far as frameworks are known to read them.

Best effort: they describe our objects in upstream's words and control nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

from fsdp2x.runtime import torch_private

_TRAINING_STATES = {"IDLE": "IDLE", "FORWARD": "FORWARD", "BACKWARD": "PRE_BACKWARD", "REDUCED": "POST_BACKWARD"}


class StateNames:
    """Mixed into ``UnitState``."""

    def _lazy_init(self) -> None:
        self.lazy_init()

    @property
    def _is_root(self) -> bool | None:
        return self.is_root

    @property
    def _fsdp_param_groups(self) -> list:
        return self.groups

    @property
    def _fsdp_param_group(self):
        if len(self.groups) > 1:
            raise AssertionError(f"unit '{self.name}' has {len(self.groups)} parameter groups, not one")
        return self.groups[0] if self.groups else None

    @property
    def _training_state(self):
        return torch_private.TrainingState[_TRAINING_STATES[self.unit.phase if self.unit is not None else "IDLE"]]

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.auto_reshard

    @property
    def _mp_policy(self):
        return self.mp_policy

    @property
    def _modules(self):
        return self.modules

    @property
    def _comm_ctx(self):
        # Roots that share one are told apart from those that do not: ours never share.
        return self.root

    @property
    def _state_ctx(self) -> SimpleNamespace:
        root_state = self.root_state()
        return SimpleNamespace(
            all_states=list(root_state.tree) if root_state is not None else [],
            is_last_backward=(root_state or self).is_last_backward,
        )


class GroupNames:
    """Mixed into ``GroupParams``."""

    @property
    def fsdp_params(self) -> list:
        return self.params

    @property
    def mesh_info(self):
        return self.ranks

    @property
    def is_sharded(self) -> bool:
        return not self.is_unsharded

    @property
    def is_unsharded(self) -> bool:
        module, name = self.params[0].owners[0]
        return module._parameters[name] is not self.params[0].param

    @property
    def _module_fqn(self) -> str:
        return self.module_fqn


class ParamNames:
    """Mixed into ``ShardedParam``."""

    @property
    def sharded_param(self):
        return self.param

    @property
    def _param_fqn(self) -> str:
        return self.fqn

    @property
    def _sharding_spec(self):
        return self.spec.sharded

    @property
    def _orig_size(self):
        return self.local_size
