"""Readings of traces for GPU benchmarks and tests, and the sizes of their models. These tests need no device."""

import pytest

from one_gpu import device_work, hf_shapes


def event(cat: str, name: str, start: float = 0.0, dur: float = 1.0, stream: int = 7) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "args": {"stream": stream}}


TRACE = {
    "traceEvents": [
        event("kernel", "gemm", 0, 10),
        event("kernel", "gemm", 12, 10),
        event("kernel", "cast", 5, 3, stream=20),
        event("kernel", "cast", 9, 4, stream=20),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 30, 5, stream=20),
        event("gpu_memset", "Memset (Device)", 40, 1),
        event("cuda_runtime", "cudaLaunchKernel"),
        event("cuda_runtime", "cudaDeviceSynchronize"),
        event("cuda_driver", "cuLaunchKernel"),
        event("cuda_runtime", "cudaMallocAsync"),
        event("cpu_op", "aten::mm"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1, "id": 3},
    ]
}


def test_kernels_copies_and_fills_are_counted():
    work = device_work.work_of(TRACE)
    assert device_work.counts(work) == {"kernels": 4, "copies": 1, "fills": 1, "all": 6}
    assert [one.name for one in work][:3] == ["gemm", "cast", "cast"]
    assert device_work.counts([]) == {"kernels": 0, "copies": 0, "fills": 0, "all": 0}


def test_overlap_of_streams():
    work = device_work.work_of(TRACE)
    compute = device_work.compute_stream(work)
    assert compute == 7
    gemms = [one for one in work if one.stream == compute and one.kind == "kernels"]
    casts = [one for one in work if one.stream != compute and one.kind == "kernels"]
    assert device_work.busy_us(gemms) == 20 and device_work.busy_us(casts) == 7
    # 5..8 and 9..10 overlap the first product, 12..13 the second.
    assert device_work.shared_us(casts, gemms) == device_work.shared_us(gemms, casts) == 5
    assert device_work.shared_us(casts, []) == 0
    with pytest.raises(ValueError, match="does not see the device"):
        device_work.compute_stream([])


@pytest.mark.parametrize("name", [*hf_shapes.SHAPES, *hf_shapes.TINY])
def test_shapes_count_their_parameters(name):
    shape = {**hf_shapes.SHAPES, **hf_shapes.TINY}[name].with_layers(2)
    model = hf_shapes.build(shape, "meta")
    assert sum(param.numel() for param in model.parameters()) == shape.numel
    assert sum(param.numel() for param in model.model.layers[0].parameters()) == shape.block_numel


def test_as_many_layers_as_fit():
    shape = hf_shapes.SHAPES["llama-8b"]
    assert round(shape.numel / 1e9, 2) == 8.03
    assert shape.fitting(10 * shape.numel, 4.0) == shape
    some = shape.fitting(20 * 2**30, 4.0)
    assert 1 < some.layers < shape.layers
    assert 4 * some.numel <= 20 * 2**30 < 4 * some.with_layers(some.layers + 1).numel
    with pytest.raises(MemoryError, match="one layer needs 5.1 GB, and 1.0 GB are free"):
        shape.fitting(10**9, 4.0)
