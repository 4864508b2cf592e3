"""What an update is made of, piece by piece: each product of the backward, the hash of A, the probe, the optimizers, applying an update."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

import logra
from cases import NAMES, layer, shapes, under
from logra import projection
from logra.bits import fingerprint
from logra.update import LowRankUpdate
from timing import Case, precision

RELATIVE_STEP = 6e-5                                        # Section 3.4.3
RESPONSES, PROBED = 128, 8                                  # an update's responses (Table 4), and those that are probed: 2 on each of 4 ranks
SHARES = {"pieces": "s"} | dict.fromkeys(("passes", "probe", "propose", "round", "apply", "hash of A", "dense passes"), ".4f")     # a table's columns


def terms(config, tokens: int, dtype: str, device: str, ranks: list[int]) -> list[Case]:
    """The seven projections' operations one by one, in the precision in which each method makes them."""
    kept = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    computed = torch.float32 if dtype == "float32" else torch.bfloat16
    draw = torch.Generator().manual_seed(0)
    W = {name: torch.randn(d, k, generator=draw).to(device, kept) for name, (d, k) in shapes(config).items()}
    X = {name: torch.randn(tokens, k, generator=draw).to(device, computed) for name, (_, k) in shapes(config).items()}
    dY = {name: torch.randn(tokens, d, generator=draw).to(device, computed) for name, (d, _) in shapes(config).items()}
    narrow = {name: w.to(computed) for name, w in W.items()}

    def each(make: Callable[[str], object]) -> Callable[[], None]:
        return lambda: [make(name) for name in NAMES] and None

    cases = [Case("Y = X Wᵀ", each(lambda n: F.linear(X[n], narrow[n]))),
             Case("dX = dY W", each(lambda n: dY[n] @ narrow[n])),
             Case("G = dYᵀ X (dense)", each(lambda n: dY[n].T @ X[n]))]
    if dtype == "autocast":
        cases.append(Case("W to bfloat16", each(lambda n: W[n].to(computed))))
    if dtype != "float32":
        cases += [Case("X to float32", each(lambda n: X[n].float())), Case("dY to float32", each(lambda n: dY[n].float()))]
    X32, dY32 = {n: x.float() for n, x in X.items()}, {n: y.float() for n, y in dY.items()}
    for rank in ranks:
        E = {n: projection.entries("rademacher", rank, shapes(config)[n][1], 1, device=device) for n in NAMES}
        P = {n: X32[n] @ E[n].T for n in NAMES}
        S = {n: torch.zeros(shapes(config)[n][0], rank, device=device) for n in NAMES}
        cases += [Case("hash of A", each(lambda n, r=rank: projection.entries("rademacher", r, shapes(config)[n][1], 1, device=device)), rank),
                  Case("P = X Aᵀ", each(lambda n, E=E: X32[n] @ E[n].T), rank),
                  Case("S += dYᵀ P", each(lambda n, P=P, S=S: S[n].addmm_(dY32[n].T, P[n])), rank)]
        if computed == torch.bfloat16 and device == "cuda":     # what tensor cores would take: the same P; S to 2e-6 in two parts, to 2e-4 in TF32
            E16, parts = {n: e.bfloat16() for n, e in E.items()}, {n: _parts(p) for n, p in P.items()}
            cases += [Case("P, bfloat16 factors and float32 sums", each(lambda n, E=E16: torch.mm(X[n], E[n].T, out_dtype=torch.float32)), rank),
                      Case("S, P in two bfloat16 parts", each(lambda n, P=parts, S=S: [torch.addmm(S[n], dY[n].T, p, out_dtype=torch.float32) for p in P[n]]), rank),
                      Case("S, TF32", _in_tf32(each(lambda n, P=P, S=S: S[n].addmm_(dY32[n].T, P[n]))), rank)]
        elif computed == torch.bfloat16:                        # what the same products would take in bfloat16: their results are rounded, and not used
            E16, P16 = {n: e.bfloat16() for n, e in E.items()}, {n: p.bfloat16() for n, p in P.items()}
            cases += [Case("P in bfloat16, not used", each(lambda n, E=E16: X[n] @ E[n].T), rank),
                      Case("dYᵀ P in bfloat16, not used", each(lambda n, P=P16: dY[n].T @ P[n]), rank)]
    return cases


def _parts(P_tr: torch.Tensor) -> list[torch.Tensor]:
    """Two bfloat16 tensors whose sum is P to 16 bits."""
    high = P_tr.bfloat16()
    return [high, (P_tr - high.float()).bfloat16()]


def _in_tf32(run: Callable) -> Callable:
    def inner():
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            run()
        finally:
            torch.backends.cuda.matmul.fp32_precision = before

    return inner


def hashes(config, device: str, ranks: list[int]) -> list[Case]:
    """All of a layer's A, by kind."""
    return [Case(kind, lambda kind=kind, rank=rank: [projection.entries(kind, rank, k, 1, device=device) for _, k in shapes(config).values()], rank)
            for kind in projection.KINDS for rank in ranks if kind != "hadamard" or rank <= min(k for _, k in shapes(config).values())]


def optimizers(config, device: str, ranks: list[int], with_others: bool) -> list[Case]:
    """One step of each optimizer on a layer's projections in float32. with_others: GaLore's and Flora's as well."""
    base, _ = layer(config, 8, "float32", device)
    draw = torch.Generator().manual_seed(0)

    def filled(weights):
        """Puts the same gradients there before each step: Flora's takes them away."""
        gradients = [(torch.randn(weight.shape, generator=draw) * 1e-4).to(device) for weight in weights]

        def fill():
            for weight, gradient in zip(weights, gradients):
                weight.grad = gradient

        return fill

    _, _, weights = under(base, NAMES, "dense", None)
    fill = filled(weights)
    cases = [Case("AdamW (dense)", torch.optim.AdamW(weights, lr=1e-6, weight_decay=0.0).step, before=fill)]
    for rank in ranks:
        _, _, sketches = under(base, NAMES, "logra", rank)
        for sketch in sketches.values():
            sketch.S_dr.copy_(torch.randn(sketch.S_dr.shape, generator=draw))
        optimizer = logra.RowAdam(sketches, relative_step=RELATIVE_STEP)
        cases += [Case("RowAdam.propose", optimizer.propose, rank), Case("RowAdam.step", optimizer.step, rank, optimizer.propose, note="rounds and applies what was proposed"),
                  Case("RowAdam, propose and step", lambda optimizer=optimizer: (optimizer.propose(), optimizer.step()) and None, rank)]
        _, _, adapters = under(base, NAMES, "lora", rank)
        cases.append(Case("AdamW (LoRA)", torch.optim.AdamW(adapters, lr=1e-6, weight_decay=0.0).step, rank, filled(adapters)))
    return cases + (_others(weights, max(ranks), fill) if with_others else [])


def _others(weights, rank: int, fill) -> list[Case]:
    """GaLore's step between refreshes of its subspace (200 apart by default), and Flora's, on the dense weights."""
    from flora_opt import Flora
    from galore_torch import GaLoreAdamW

    galore = GaLoreAdamW([dict(params=weights, rank=rank, update_proj_gap=1 << 30, scale=0.25, proj_type="std")], lr=1e-6, no_deprecation_warning=True)
    return [Case("GaLoreAdamW.step", galore.step, rank, fill, note="without its SVD"),
            Case("Flora.step", Flora(weights, lr=1e-6, rank=rank, beta1=0.9).step, rank, fill)]


def subspaces(config, device: str) -> list[Case]:
    """GaLore's refresh: a full SVD of each of a layer's gradients, whatever the rank; made once in 200 steps by default."""
    from galore_torch.galore_projector import GaLoreProjector

    draw = torch.Generator().manual_seed(0)
    G = [torch.randn(d, k, generator=draw).to(device) for d, k in shapes(config).values()]
    return [Case("GaLore, SVD", lambda: [GaLoreProjector(1).project(g, 0) for g in G] and None)]


def of_layer(config, tokens: int, dtype: str, device: str, rank: int) -> list[Case]:
    """The pieces of an update for one decoder layer, whose weights are float32 (compute: `dtype`)."""
    base, run = layer(config, tokens, dtype, device)
    _, again = layer(config, tokens, dtype, device, checkpointed=True)
    dense, before, _ = under(base, NAMES, "dense", None)
    module, _, sketches = under(base, NAMES, "logra", rank)
    update, cases = _fixed(sketches)
    factors = {name: (matrix.factor(), matrix.key) for name, matrix in update.matrices.items()}

    def probe():
        with torch.no_grad():                               # in float32: a bfloat16 forward would round the differences away
            for a in (1.0, -1.0):
                with sketches.perturbed(factors, a):
                    run.forward(module)

    return [Case("dense pass", lambda: run(dense), before=before), Case("pass", lambda: run(module), rank),
            Case("dense pass, checkpointed", lambda: again(dense), before=before), Case("pass, checkpointed", lambda: again(module), rank),
            Case("probe of a response", probe, rank, note="two forwards at ±D"), *cases]


def of_model(model, tokens: int, dtype: str, device: str, rank: int, methods=("finite_difference", "jvp")) -> list[Case]:
    """The pieces of an update for a whole model in float32, its loss that of `logra.rl.loss`. The probe computes in float32."""
    names = list(logra.attach(model, 1))
    logra.detach(model)
    dense, before, _ = under(model, names, "dense", None)
    module, _, sketches = under(model, names, "logra", rank)
    update, cases = _fixed(sketches)
    batch = example(model.config.vocab_size, tokens, device)
    contexts = logra.Contexts.of_responses(*batch)
    return [Case("dense pass", lambda: loss(dense, batch, dtype, device).backward(), before=before),
            Case("pass", lambda: loss(module, batch, dtype, device).backward(), rank), *cases,
            *(Case("probe of a response" if method == "finite_difference" else f"probe by {method}",
                   lambda method=method: logra.predicted_kl(module, update, contexts, method), rank) for method in methods)]


def example(vocabulary: int, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and response mask of one response, [1, tokens]; an eighth of it is the prompt."""
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return ids, torch.ones_like(ids), (torch.arange(tokens, device=device) >= max(1, tokens // 8))[None]


def loss(model, batch, dtype: str, device: str) -> torch.Tensor:
    from logra.rl.loss import token_logprobs

    with precision(dtype, device):
        return -token_logprobs(model, *batch).mean()


def model_passes(model, tokens: int, dtype: str, device: str, ranks: list[int], methods: list[str]) -> list[Case]:
    """A case a method and rank: forward and backward of a whole model and its loss, on one response."""
    names = list(logra.attach(model, 1))
    logra.detach(model)
    batch, cases = example(model.config.vocab_size, tokens, device), []
    for method in methods:
        for rank in ([None] if method.startswith("dense") else ranks):
            module, before, _ = under(model, names, method, rank)
            cases.append(Case(method, (lambda module=module: loss(module, batch, dtype, device).backward()), rank, before))
    return cases


def _fixed(sketches):
    """An update, from sketches that are filled with noise, and what one costs once, whatever its tokens."""
    draw = torch.Generator().manual_seed(0)
    for sketch in sketches.values():
        sketch.S_dr.copy_(torch.randn(sketch.S_dr.shape, generator=draw))
    optimizer = logra.RowAdam(sketches, relative_step=RELATIVE_STEP)
    proposal = optimizer.propose()
    factors = {name: U * -proposal.eta for name, U in proposal.items()}
    update = LowRankUpdate.round(sketches, factors)

    def hashed():
        for sketch in sketches.values():
            projection.entries(sketches.projection, sketches.rank, sketch.k, sketch.key, device=sketch.weight.device)

    rank = sketches.rank
    return (update,
            [Case("hash of A", hashed, rank), Case("propose", optimizer.propose, rank),
             Case("round", lambda: LowRankUpdate.round(sketches, factors), rank),
             Case("apply", lambda: update.apply(sketches), rank, note="fingerprints included"),
             Case("fingerprints", lambda: [fingerprint(sketch.weight.detach()) for sketch in sketches.values()] and None, rank)])


def whole_updates(model, tokens: int, dtype: str, device: str, ranks: list[int], responses: int = RESPONSES // PROBED) -> list[Case]:
    """An update as training makes it, without the rollout: micro-batches of one response, for LoGRA the probe of one of them, the step."""
    names = list(logra.attach(model, 1))
    logra.detach(model)
    batch = example(model.config.vocab_size, tokens, device)
    contexts = logra.Contexts.of_responses(*batch)

    def passes(module):
        for _ in range(responses):
            loss(module, batch, dtype, device).backward()

    def adam(method, rank):
        module, before, weights = under(model, names, method, rank)
        optimizer = torch.optim.AdamW(weights, lr=1e-6, weight_decay=0.0)
        return Case(method, lambda: (passes(module), optimizer.step()) and None, rank, before)

    def sketched(rank):
        module, _, sketches = under(model, names, "logra", rank)
        optimizer = logra.RowAdam(sketches, relative_step=RELATIVE_STEP)
        control = logra.KLControl(logra.ConstantBudget(2e-4), method="finite_difference")

        def update():
            passes(module)
            optimizer.step(control.scale(module, optimizer.propose(), contexts))

        return Case("logra", update, rank, optimizer.zero_grad, note=f"1 of {responses} responses probed")

    return [adam("dense", None), *(make for rank in ranks for make in (sketched(rank), adam("lora", rank)))]


def shares(rows: list[dict], suffix: str = "", hashed: int = 1) -> dict:
    """Each piece's share of an update of 128 responses, 8 of them probed, from its median seconds; and that of as many dense passes.

    suffix: of the passes' names, such as ", checkpointed". hashed: how often a pass hashes A.
    """
    seconds = {row["method"]: row["seconds"] for row in rows}
    parts = {"passes": RESPONSES * seconds["pass" + suffix], "probe": PROBED * seconds["probe of a response"],
             "propose": seconds["propose"], "round": seconds["round"], "apply": seconds["apply"]}
    total = sum(parts.values())
    return ({"pieces": "pass" + suffix, "responses": RESPONSES, "probed": PROBED, "seconds": total}
            | {name: part / total for name, part in parts.items()}
            | {"hash of A": RESPONSES * hashed * seconds["hash of A"] / total, "dense passes": RESPONSES * seconds["dense pass" + suffix] / total})
