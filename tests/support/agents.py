"""Two agents of torchrun on one machine, which count as two hosts."""

import socket

from harness import programs
from harness.pool import PATH

AGENT_TIMEOUT_S = 100


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run_agents(tmp_path, *program) -> list[str]:
    """Runs two agents of two ranks, each as on a separate host, and returns their output."""
    port, agents = free_port(), []
    try:
        for node in range(2):
            words = (*programs.TORCHRUN, "--nnodes=2", "--nproc_per_node=2", f"--node_rank={node}")
            words += ("--master_addr=127.0.0.1", f"--master_port={port}", f"--log-dir={tmp_path / str(node)}", *program)
            env = programs.environment(PYTHONPATH=PATH)
            agents.append(programs.Program(*words, log=tmp_path / f"log{node}", env=env))
        statuses = [agent.wait(AGENT_TIMEOUT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.end()
    outputs = [agent.log.read_text() for agent in agents]
    assert statuses == [0, 0], "\n".join(outputs)
    return outputs
