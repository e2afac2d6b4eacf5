"""One GPU: collectives by reading the peers' memory, the ranks played by streams of one process.

Links between devices cannot be shown this way; that barriers hold streams and not the host can.
"""

import pytest
import torch

from fsdp2x.runtime.native import _C

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and finds none"),
    pytest.mark.skipif(not _C.has_device_kernels(), reason="needs the CUDA kernels, and fsdp2x was built without"),
    pytest.mark.shows("peers"),
]

WORLD = 3


class Ranks:
    """One object and one stream per rank; what each allocates first belongs together, and so on."""

    def __init__(self, timeout: float) -> None:
        self._blocks: list[list[torch.Tensor]] = []
        self._taken = [0] * WORLD
        self.streams = [torch.cuda.Stream() for _ in range(WORLD)]
        for stream in self.streams:
            with torch.cuda.stream(stream):
                torch.empty(1000, device="cuda")  # later allocations of plans need not wait for other streams
        self.peers = [
            _C.PeerCollectives(rank, list(range(WORLD)), lambda size, r=rank: self._share(r, size), timeout)
            for rank in range(WORLD)
        ]

    def _share(self, rank: int, num_bytes: int):
        number = self._taken[rank]
        self._taken[rank] += 1
        if number == len(self._blocks):
            self._blocks.append([torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(WORLD)])
            torch.cuda.synchronize()
        block = self._blocks[number]
        return block[rank], [memory.data_ptr() for memory in block], block

    def each(self, call) -> None:
        """``call(rank, its collectives)`` on each rank's stream, from one thread: nothing may wait for a peer here."""
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call(rank, self.peers[rank])
        torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def _loaded_kernels() -> None:
    """Runs every kernel once: the first launch of one may wait for the device, and so for a barrier that waits for us.

    Nobody answers these ranks, so their barriers give up at once, and nothing more can be asked of them.
    """
    ranks = Ranks(timeout=0.001)
    memories = [peers.allocate(WORLD * 64) for peers in ranks.peers]
    ranks.peers[0].all_gather(memories[0], memories[0][:64])
    ranks.peers[1].reduce_scatter(torch.empty(16, device="cuda"), memories[1].view(torch.float32), False)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathers_and_reductions(dtype):
    ranks, numel = Ranks(timeout=20.0), 70003
    memories = [peers.allocate(WORLD * numel * dtype.itemsize).view(dtype) for peers in ranks.peers]
    torch.manual_seed(0)
    every = torch.randn(WORLD, WORLD, numel, device="cuda").to(dtype)  # by rank, by part
    outputs = torch.empty(WORLD, numel, dtype=dtype, device="cuda")
    total = every[0].float()
    for rank in range(1, WORLD):
        total = total + every[rank].float()
    for _ in range(3):
        for memory, values in zip(memories, every, strict=True):
            memory.copy_(values.flatten())
        ranks.each(lambda rank, peers: peers.reduce_scatter(outputs[rank], memories[rank], False))
        assert torch.equal(outputs, total.to(dtype))
        ranks.each(lambda rank, peers: peers.all_gather(memories[rank], memories[rank].view(WORLD, numel)[rank]))
        for memory in memories:
            assert torch.equal(memory.view(WORLD, numel), torch.stack([every[rank][rank] for rank in range(WORLD)]))


def test_a_peer_that_does_not_come_is_an_error():
    ranks = Ranks(timeout=0.5)
    memories = [peers.allocate(WORLD * 64) for peers in ranks.peers]
    ranks.peers[0].all_gather(memories[0], memories[0][:64])
    torch.cuda.synchronize()
    for call in (ranks.peers[0].check, lambda: ranks.peers[0].all_gather(memories[0], memories[0][:64])):
        with pytest.raises(RuntimeError, match="rank 0 waited 0.5 s for ranks 1, 2 in a collective"):
            call()


def test_a_capture_is_refused():
    """A replay would have the barriers' old numbers, and wait for nobody."""
    ranks = Ranks(timeout=20.0)
    memories = [peers.allocate(WORLD * 64) for peers in ranks.peers]
    ranks.each(lambda rank, peers: peers.all_gather(memories[rank], memories[rank][64 * rank :][:64]))
    with (
        pytest.raises(RuntimeError, match="cannot be captured into a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ranks.peers[0].all_gather(memories[0], memories[0][:64])
