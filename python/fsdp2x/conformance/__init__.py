"""The contract of FSDP2 as tests for any engine with a function like ``fully_shard``.

``pytest -p fsdp2x.conformance.plugin --pyargs fsdp2x.conformance --engine MODULE:FUNCTION`` tests an engine.
``python -m fsdp2x.conformance MODULE:FUNCTION ...`` prints a table of several engines. Only these commands need pytest.

- ``behavior``: how a behavior is declared, what it gets, and helpers to compare with the unsharded model.
- ``wrapping``, ``training``, ``precision``, ``states``, ``control``, ``newest``: the behaviors.
- ``ranks``: processes that run them. ``plugin`` and ``test_contract``: pytest's side.
"""
