"""The sections of benchmarks/gpu.py but decoding: ceilings, each kernel against its torch reference and then
its time, and a training step.

    python benchmarks/gpu_sections.py NAME [--small]        one section, its lines as JSON

A section first compares, then measures, so that a wrong kernel gets no time. With --small it runs at toy
sizes on the CPU, kernels in Triton's interpreter: the script is tried out, its figures mean nothing.
Times: CUDA events, the cache of the device overwritten before each run, median of 20 with p20 and p80.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from unittest import mock

import torch

FLUSHED = 2**28  # bytes written before each run, more than the second-level cache of any device


@dataclass(frozen=True)
class Line:
    """What was measured. ms: median, p20 and p80, empty where there is no time; gib, gflop: what one run has
    to read and write, and to compute; note: anything else."""

    what: str
    ms: tuple[float, ...] = ()
    gib: float = 0.0
    gflop: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """Where and at which sizes. pick(a, b): a on a device, b if small."""

    small: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.small else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    def pick(self, large, small):
        return small if self.small else large

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def ints(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def time(self, function: Callable[[], object]) -> tuple[float, ...]:
        """Milliseconds of a run: median, p20, p80."""
        warm, runs = self.pick((3, 20), (0, 1))
        for _ in range(warm):
            function()
        found = sorted(self._once(function) for _ in range(runs))
        return (statistics.median(found), found[round(0.2 * (runs - 1))], found[round(0.8 * (runs - 1))])

    def _once(self, function: Callable[[], object]) -> float:
        if self.small:
            began = time.perf_counter()
            function()
            return 1e3 * (time.perf_counter() - began)
        torch.empty(FLUSHED, dtype=torch.uint8, device=self.device).zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def compare(what: str, found: torch.Tensor, expected: torch.Tensor, bound: float) -> Line:
    """The largest difference as a share of the largest expected number; an error above `bound`."""
    expected = expected.double().cpu()
    drift = ((found.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    if not drift <= bound:
        raise AssertionError(f"{what}: differs from the reference by {drift:.3g} of it, bound {bound:.3g}")
    return Line(f"{what}: right", note=f"off by {drift:.1e} (bound {bound:.0e})")


def equal(what: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Line:
    """An error unless the tensors, on whatever device, are the same bit for bit."""
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not a.equal(b.to(a.device))]
    if wrong:
        raise AssertionError(f"{what}: tensors {wrong} of {len(found)} differ from the reference")
    return Line(f"{what}: right", note="bit for bit")


def ceilings(bench: Bench) -> Iterator[Line]:
    """What a copy and a matrix product reach."""
    size, edge = bench.pick((2**30, 8192), (2**16, 64))
    a, b = (bench.normal(size, dtype=bench.dtype) for _ in range(2))
    gib = 2 * a.numel() * a.element_size() / 2**30
    yield Line("copy", bench.time(lambda: a.copy_(b)), gib=gib)
    x, y = bench.normal(edge, edge), bench.normal(edge, edge)
    yield Line("product", bench.time(lambda: x @ y), gflop=2 * edge**3 / 1e9, note=f"{edge} x {edge}")


def random_tree(nodes: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, i, (1,), generator=draw)) if i else -1 for i in range(nodes)]


def tree_build(bench: Bench) -> Iterator[Line]:
    from spectrain.kernels.tree_build import reference
    from spectrain.kernels.tree_build_triton import launch

    B, N = bench.pick((8, 64), (2, 5))
    lists = [[random_tree(N, b) for b in range(B)], [N - b % 2 for b in range(B)], list(range(100, 100 + B))]
    on_cpu = [torch.tensor(values, dtype=torch.int32) for values in lists]
    inputs = [bench.ints(values) for values in lists]
    found, expected = launch(*inputs), reference(*on_cpu)
    yield equal(", ".join(vars(found)), list(vars(found).values()), list(vars(expected).values()))
    yield Line(f"{B} trees of {N}", bench.time(lambda: launch(*inputs)))


def _tree_case(bench: Bench, B: int, L: int, N: int, heads: tuple[int, int, int], dtype: torch.dtype):
    """Queries, keys, values and rows of B trees of N nodes behind L tokens."""
    from spectrain.kernels.tree_attention import TreeRows
    from spectrain.kernels.tree_build import reference

    H, G, K = heads
    parents = [random_tree(N, b) for b in range(B)]
    tree = reference(*(torch.tensor(x, dtype=torch.int32) for x in (parents, [N] * B, [L] * B)))
    lists = (range(B), range(0, B * N, N), [N] * B, [L] * B, [N] * B)
    tensors = [bench.ints(list(values)) for values in lists]
    rows = TreeRows(*tensors, tree.depths.to(bench.device), tree.bits.to(bench.device), most=N)
    keys, values = (bench.normal(B, L + N, G, K, dtype=dtype) for _ in range(2))
    return bench.normal(H, B * N, K, dtype=dtype), keys, values, rows


def tree_attention(bench: Bench) -> Iterator[Line]:
    from spectrain.kernels.tree_attention import Form, TreeRows, reference
    from spectrain.kernels.tree_attention_triton import launch, splits_of

    processors = bench.pick(132, 1)
    if not bench.small:
        processors = torch.cuda.get_device_properties(bench.device).multi_processor_count
    for dtype, bound in bench.pick(((torch.float32, 1e-5), (torch.bfloat16, 2e-2)), ((torch.float32, 1e-5),)):
        for heads in bench.pick(((32, 8, 128), (9, 3, 64), (8, 8, 80), (8, 2, 256)), ((2, 1, 16),)):
            for form in (Form(0.1), Form(0.1, window=40, softcap=20.0)):
                q, k, v, rows = _tree_case(bench, *bench.pick((2, 1000, 37), (1, 20, 5)), heads, dtype)
                found = launch(q, k, v, rows, form, splits=splits_of(q, k, rows, processors))
                moved = [x.cpu() if isinstance(x, torch.Tensor) else x for x in vars(rows).values()]
                exact = reference(
                    q.double().cpu(), k.double().cpu(), v.double().cpu(), TreeRows(*moved), form
                )
                name = f"{str(dtype).removeprefix('torch.')}, heads {heads}" + ", window" * bool(form.window)
                yield compare(name, found, exact, bound)
    H, G, K = heads = bench.pick((32, 8, 128), (2, 1, 16))
    L = bench.pick(4096, 20)
    for B in bench.pick((1, 8), (1,)):
        for N in bench.pick((1, 6, 64), (3,)):
            q, k, v, rows = _tree_case(bench, B, L, N, heads, bench.dtype)
            splits = splits_of(q, k, rows, processors)
            size = k.element_size()
            yield Line(
                f"B {B}, L {L}, N {N}",
                bench.time(lambda q=q, k=k, v=v, r=rows, s=splits: launch(q, k, v, r, Form(0.1), splits=s)),
                gib=size * (2 * B * (L + N) * G * K + 2 * q.numel()) / 2**30,
                gflop=4 * B * N * H * K * (L + N / 2) / 1e9,
                note=f"{splits} splits",
            )


def verify(bench: Bench) -> Iterator[Line]:
    from spectrain.decode import by_kernel
    from spectrain.decode.sampling import Sampling, Streams
    from spectrain.decode.verify import verify as walk
    from spectrain.kernels.row_laws_triton import Filters
    from spectrain.kernels.verify_triton import verify as launch
    from spectrain.proposal import Proposal

    # Float32 sums round differently on a device. Among 5,000 ids no draw lies as near to the edge of one as
    # that; among 128,256 one in a hundred would.
    B, N, V = bench.pick((8, 63, 5000), (2, 3, 96))
    parents = [random_tree(N, b) for b in range(B)]
    proposals = [Proposal(torch.arange(N) + 1, tuple(p)) for p in parents]
    starts = list(range(0, B * (N + 1), N + 1))
    logits = bench.normal(B * (N + 1), V, dtype=torch.float32)
    logits[:, 1 : N + 1] += 3  # draft tokens are likely, so that walks go deep
    wide = logits.cpu()
    samplings = [Sampling(), Sampling(temperature=0.8), Sampling(temperature=1.0, top_k=50, top_p=0.9)]
    for sampling in bench.pick(samplings, samplings[1:2]):

        def laws(which, nodes, sampling=sampling):
            return sampling.law(wide[[starts[i] + node + 1 for i, node in zip(which, nodes, strict=True)]])

        keys = {"requests": list(range(B)), "root_positions": [100 + b for b in range(B)]}
        settings = {"law": "target_only", "streams": Streams(sampling, list(range(B))), **keys}
        expected = walk(proposals, laws, **settings)
        found = by_kernel.verify_by_kernel(proposals, logits, starts, laws, **settings)
        wrong = [
            b for b in range(B) if (found[b].path, found[b].bonus) != (expected[b].path, expected[b].bonus)
        ]
        if wrong:
            raise AssertionError(f"{sampling}: requests {wrong} get other verdicts than by decode/verify.py")
        yield Line(f"T {sampling.temperature}, top-p {sampling.top_p}: right", note=f"{B} equal verdicts")
    trees = by_kernel._trees(proposals, starts, bench.device)
    uniforms = torch.rand(B, N + 1, 3, dtype=torch.float64, device=bench.device)
    V = bench.pick(128256, 96)
    logits = bench.normal(B * (N + 1), V)
    filters = {"greedy": Filters(0.0), "T 1": Filters(1.0), "T 1, top-p 0.9": Filters(1.0, top_p=0.9)}
    for name in bench.pick(list(filters), ["T 1"]):
        seconds = bench.time(lambda name=name: launch(logits, trees, uniforms, filters[name]))
        gib = logits.numel() * logits.element_size() / 2**30
        yield Line(f"{name}, B {B}, N {N}, V {V}", seconds, gib=gib, note="bytes: the logits once")


def commit(bench: Bench) -> Iterator[Line]:
    from spectrain.kernels.commit import Table, reference
    from spectrain.kernels.commit_triton import launch

    B, S, layers = bench.pick((8, 4096, 32), (2, 12, 2))
    shape = (B, S, *bench.pick((8, 128), (1, 8)))
    tensors = [bench.normal(*shape) for _ in range(2 * layers)]
    copies = [t.clone() for t in tensors]
    path = [[i * 2 + b % 2 for i in range(4)] for b in range(B)]
    lists = [bench.ints(x) for x in (list(range(B)), [S // 4 + b % 3 for b in range(B)], path, [4] * B)]
    tables = Table.of(tensors)
    launch(tables, *lists)
    reference(Table.of(copies), *lists)
    yield equal("the path moved", tensors, copies)
    moved = 2 * 4 * B * 2 * layers * shape[2] * shape[3] * tensors[0].element_size() / 2**30
    seconds = bench.time(lambda: launch(tables, *lists))
    yield Line(f"B {B}, 4 nodes, {2 * layers} tensors", seconds, gib=moved)


def state_commit(bench: Bench) -> Iterator[Line]:
    from spectrain.kernels.state_commit import reference
    from spectrain.kernels.state_commit_triton import launch

    B, D, width, layers = bench.pick((8, 5, 2**19, 8), (2, 2, 40, 2))
    states = [bench.normal(B, width) for _ in range(layers)]
    snapshots = [bench.normal(B, D + 1, width) for _ in range(layers)]
    lists = bench.ints(list(range(B))[::-1]), bench.ints([b % (D + 1) for b in range(B)])
    expected = [state.clone() for state in states]
    reference(expected, snapshots, *lists)
    launch(states, snapshots, *lists)
    yield equal("states", states, expected)
    gib = 2 * B * width * layers * states[0].element_size() / 2**30
    seconds = bench.time(lambda: launch(states, snapshots, *lists))
    yield Line(f"B {B}, {layers} layers", seconds, gib=gib, note="the engine does not call it")


def linear_divergence(bench: Bench) -> Iterator[Line]:
    from spectrain.kernels import linear_divergence as module
    from spectrain.kernels.linear_divergence_triton import LinearDivergence
    from spectrain.objectives import CHUNK

    def problem(device, dtype, R, M, D, W):
        draw = torch.Generator().manual_seed(0)
        z, head = (torch.randn(n, D, generator=draw) for n in (R, W))
        state, other = torch.randn(M, D, generator=draw), torch.randn(W, D, generator=draw) / D**0.5
        lse = (state @ other.T).logsumexp(-1) + 0.3
        source, slot = torch.randint(M, (R,), generator=draw), torch.randint(7, (R,), generator=draw)
        leaves = [t.to(device, dtype).requires_grad_() for t in (z, head / D**0.5)]
        moved = [t.to(device, dtype) for t in (state, lse, other)]
        return leaves, module.Teacher(*moved), source.to(device), slot.to(device)

    def run(leaves, teacher, source, slot, terms, chunk=64):
        weights = {t: torch.full((len(source),), 1 / len(source)).to(leaves[0]) for t in terms}
        with mock.patch.object(module, "form", lambda device: LinearDivergence):
            loss, stats = module.linear_divergence(*leaves, teacher, source, slot, weights, chunk=chunk)
        loss.backward()
        return loss, stats

    sizes = bench.pick((300, 40, 256, 3000), (9, 3, 16, 40))
    terms = [term for term in module.TERMS if term != "ce"]
    ours, exact = problem(bench.device, torch.float32, *sizes), problem("cpu", torch.float64, *sizes)
    (loss, stats), weights = (
        run(*ours, terms),
        {t: torch.full((sizes[0],), 1 / sizes[0]).double() for t in terms},
    )
    expected, theirs = module.linear_divergence(*exact[0], *exact[1:], weights)
    expected.backward()
    found = {"loss": (loss, expected), "alpha": (stats["alpha"], theirs["alpha"])}
    found |= {f"d{n}": (a.grad, b.grad) for n, a, b in zip(("z", "W"), ours[0], exact[0], strict=True)}
    for name, (a, b) in found.items():
        yield compare(name, a, b, 1e-3)
    R, M, D, W = bench.pick((5734, 2048, 4096, 32000), (9, 3, 16, 40))
    whole = problem(bench.device, torch.float32, R, M, D, W)

    def step():
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.small):
            run(*whole, ["kl"], chunk=CHUNK["cuda"] // 7)

    gflop = (2 * M * D * W + 6 * R * D * W) / 1e9
    yield Line(f"kl, R {R}, M {M}, D {D}, W {W}", bench.time(step), gflop=gflop, note="with gradients")


def ttt_attention(bench: Bench) -> Iterator[Line]:
    from spectrain.kernels.ttt_attention import Own, Run, reference
    from spectrain.kernels.ttt_attention_triton import TTTAttention

    def draw(H, G, K, S, steps, dtype):
        places = torch.arange(S, device=bench.device)
        tensors = [bench.normal(n, S, K, dtype=dtype).requires_grad_() for n in (H, *[G] * (2 + 2 * steps))]
        return tensors, [places] * steps

    def run(tensors, places, runs):
        return TTTAttention.apply(runs, 0.1, places, *tensors)

    torch.set_float32_matmul_precision("highest")
    for dtype, bound in bench.pick(((torch.float32, 1e-4), (torch.bfloat16, 3e-2)), ((torch.float32, 1e-4),)):
        H, G, K, S, steps = bench.pick((8, 2, 128, 300, 3), (2, 1, 16, 12, 1))
        tensors, places = draw(H, G, K, S, steps, dtype)
        runs = (Run(0, S // 3, 0, 0), Run(S // 3, S - S // 3, S // 3, S // 3))
        out = run(tensors, places, runs)
        exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
        own = [Own(k, v, p.cpu()) for k, v, p in zip(exact[3::2], exact[4::2], places, strict=True)]
        expected = reference(*exact[:3], own, runs, 0.1)
        grad = bench.normal(H, S, K, dtype=dtype)
        out.backward(grad)
        expected.backward(grad.double().cpu())
        name = str(dtype).removeprefix("torch.")
        yield compare(f"{name}, output", out, expected, bound)
        for label, a, b in zip(("dq", "dk", "dv", "d own key"), tensors, exact, strict=False):
            yield compare(f"{name}, {label}", a.grad, b.grad, bound)
    H, G, K, S, steps = bench.pick((32, 8, 128, 2048, 6), (2, 1, 16, 12, 1))
    tensors, places = draw(H, G, K, S, steps, bench.dtype)
    grad, whole = bench.normal(H, S, K), (Run(0, S, 0, 0),)
    forward = 4 * H * K * (S * S / 2 + steps * S) / 1e9
    shape = f"H {H}, S {S}, {steps} later steps"
    yield Line(f"forward, {shape}", bench.time(lambda: run(tensors, places, whole)), gflop=forward)
    both = bench.time(lambda: run(tensors, places, whole).backward(grad))
    yield Line(f"forward and backward, {shape}", both, gflop=3.5 * forward)


def training(bench: Bench) -> Iterator[Line]:
    """One step of EAGLE-3 for an 8B-shaped target as benchmarks/train_tensors.py has it, under bfloat16
    autocast."""
    import train_tensors
    from torch.utils.flop_counter import FlopCounterMode

    shape = bench.pick(
        train_tensors.Shape(4096, 14336, 32, 8, 2048, 128256, 32000, 7, threads=0),
        train_tensors.Shape(32, 32, 2, 1, 64, 96, 48, 3, threads=0),
    )
    for density in bench.pick((1.0, 0.4), (0.4,)):
        ours = train_tensors.eagle3_step(shape, density, device=bench.device.type)

        def run(ours=ours) -> float:
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.small):
                loss = ours.loss()
            loss.backward()
            ours.drafter.zero_grad()
            return loss.item()

        loss, rows = run(), int(ours.stats["count"].sum())
        if not bench.small:
            torch.cuda.reset_peak_memory_stats()
        with FlopCounterMode(display=False) as counter:
            run()
        peak = "" if bench.small else f", peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        found = bench.time(run)
        note = f"{rows} rows, loss {loss:.3f}, {shape.tokens / found[0]:.1f}k tokens/s{peak}, FLOPs of mm"
        gflop = counter.get_total_flops() / 1e9
        yield Line(f"step, {shape.tokens} tokens, {density:.0%} supervised", found, gflop=gflop, note=note)


def decode(bench: Bench) -> Iterator[Line]:
    import gpu_decode

    yield from (Line(**line) for line in gpu_decode.lines(bench))


SECTIONS = {
    f.__name__: f
    for f in (
        ceilings, tree_build, tree_attention, verify, commit, state_commit, linear_divergence, ttt_attention,
        training, decode,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    # read when Triton is first imported
    os.environ |= {"TRITON_INTERPRET": "1" if args.small else "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    torch.manual_seed(0)
    for line in SECTIONS[args.section](Bench(args.small)):
        print(json.dumps(asdict(line)), flush=True)


if __name__ == "__main__":
    main()
