"""Compilers, exporters and tracers take the model whole, with the sizes that should stay free left free."""

import shutil

import pytest
import torch
import torch._dynamo.testing
from swin_cases import assert_near, images, readable, swin

VERSIONS = pytest.mark.parametrize("version", [1, 2])
SHORT = {"depths": (1, 2)}  # a shifted block and a merging: all there is to capture


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small(version: int, **changes) -> torch.nn.Module:
    return swin(version, **SHORT | changes).eval()


# --- torch.compile ---


def test_compile_is_one_graph_and_new_sizes_recompile_rarely():
    """A recompilation for each way to pad: never again for a size that pads like one before."""
    counter = torch._dynamo.testing.CompileCounter()
    model = small(2, depths=(2,), num_heads=(2,))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    sizes = [(32, 32), (64, 64), (96, 64), (36, 52), (40, 44), (128, 96), (33, 47), (56, 72)]
    with torch.no_grad():
        for size in sizes:
            assert_near(compiled(images(2, 3, *size)), model(images(2, 3, *size)))
    assert counter.frame_count <= 5


@VERSIONS
def test_compile_takes_any_batch_after_two(version):
    counter = torch._dynamo.testing.CompileCounter()
    model = small(version)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for B in (2, 3, 5, 8, 4):
            assert_near(compiled(images(B, 3, 32, 32)), model(images(B, 3, 32, 32)))
    assert counter.frame_count <= 2


@VERSIONS
def test_compile_has_the_same_gradients(version):
    model = small(version).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = images(2, 3, 36, 36)
    compiled(x).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for p, grad in zip(model.parameters(), ours, strict=True):
        assert_near(grad, p.grad)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler behind torch.compile needs g++")
def test_generated_code_gives_the_same_numbers():
    model = small(2, dtype=torch.float32, depths=(1,), num_heads=(2,))
    compiled = torch.compile(model, fullgraph=True)
    x = images(2, 3, 36, 36, dtype=torch.float32)
    with torch.no_grad():
        assert_near(compiled(x), readable(model)(x), 1e-5)


def test_compile_takes_pyramids_checkpointing_and_chunks():
    x = images(1, 3, 36, 36)
    changes = ({"features_only": True}, {"checkpointing": True}, {"window_chunk": 2}, {"attention": "sdpa"})
    for change in changes:
        model = small(1, **change).train()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        ours, theirs = compiled(x), model(x)
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
        for a, b in pairs:
            assert_near(a.detach(), b.detach())


# --- export ---


@VERSIONS
def test_export_leaves_the_batch_free(version):
    model, x = small(version), images(5, 3, 36, 36)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x[:2],), dynamic_shapes={"x": {0: batch}})
    module = program.module()
    with torch.no_grad():
        for B in (1, 2, 5):
            assert_near(module(x[:B]), model(x[:B]))


@VERSIONS
@pytest.mark.parametrize("strict", [False, True])
def test_exported_tables_are_constants(version, strict):
    """In evaluation, without gradients, the bias is a table; the network behind V2's is gone from the graph."""
    model = small(version).requires_grad_(False)
    program = torch.export.export(model, (images(1, 3, 32, 32),), strict=strict)
    assert not [node for node in program.graph.nodes if "sigmoid" in str(node.target)]
    assert_near(program.module()(images(1, 3, 32, 32)), model(images(1, 3, 32, 32)))


@VERSIONS
def test_onnx_leaves_the_batch_free(version, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x = small(version, dtype=torch.float32), images(5, 3, 36, 36, dtype=torch.float32)
    file = tmp_path / "swin.onnx"
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    torch.onnx.export(
        model, (x[:2],), file, dynamo=True, external_data=False, dynamic_shapes=shapes, verbose=False
    )
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (name,) = (entry.name for entry in session.get_inputs())
    with torch.no_grad():
        for B in (1, 2, 5):
            (out,) = session.run(None, {name: x[:B].numpy()})
            assert_near(torch.from_numpy(out), model(x[:B]), 1e-5)


# --- tracers ---


@VERSIONS
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*deprecated", "ignore:.*legacy")
def test_a_trace_of_one_image_runs_three(version, grad):
    model, x = small(version), images(3, 3, 36, 36)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, x[:1])
        assert_near(traced(x), model(x))


@VERSIONS
def test_fx_takes_any_batch_of_its_size(version):
    model, x = small(version, img_size=(36, 36)), images(3, 3, 36, 36)
    traced = torch.fx.symbolic_trace(model)
    assert_near(traced(x), model(x))
    assert_near(traced(x[:1]), model(x[:1]))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    assert_near(traced(x), model(x))  # parameters are shared, nothing is baked in


@VERSIONS
def test_a_fake_tensor_has_the_shape_of_the_result(version):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, x = small(version), images(2, 3, 36, 44)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (2, 7)
        assert model(x).shape == (2, 7)
    assert_near(model(x), readable(model)(x))  # nothing fake was cached


# --- dispatch modes ---


@VERSIONS
def test_counting_operations_does_not_change_them(version):
    from torch.utils.flop_counter import FlopCounterMode

    model, x = small(version), images(2, 3, 36, 36)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = model(x)
    assert_near(out, readable(model)(x).detach())
    assert counter.get_total_flops() > 0
