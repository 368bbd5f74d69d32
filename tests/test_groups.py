"""Routing: total, first match wins, printable; and what the optimizer makes of it."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from torch import nn

import mars
from mars import MARS
from mars.options import ratio_1d
from mars.rule import KINDS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(8)
        self.attn = nn.Linear(8, 24)
        self.out_proj = nn.Linear(8, 8, bias=False)


class Gpt(nn.Module):
    """Names and shapes of a small GPT, head tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(20, 8)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv2d(2, 3, 3)
        self.lm_head = nn.Linear(8, 20, bias=False)


def names(group: dict) -> set[str]:
    return {name for name, _ in group["params"]}


def by_name(groups: list[dict]) -> dict[str, dict]:
    return {name: group for group in groups for name in names(group)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_exactly_once(kind: str) -> None:
    model = Gpt()
    groups = mars.param_groups(model, mars_type=kind)
    routed = [p for group in groups for _, p in group["params"]]
    assert len(routed) == len(set(routed))
    assert set(routed) == set(model.parameters())
    optimizer = MARS(groups)
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())


@pytest.mark.parametrize("kind", ["mars-m", "mars-shampoo"])
def test_matrix_types_leave_embeddings_and_head_to_adamw(kind: str) -> None:
    groups = by_name(mars.param_groups(Gpt(), mars_type=kind))
    for name in ("wte.weight", "pos_embed", "lm_head.weight", "blocks.0.ln.weight", "conv.weight"):
        assert groups[name]["mars_type"] == "plain-adamw", name
    for name in ("blocks.0.attn.weight", "blocks.1.out_proj.weight"):
        assert groups[name]["mars_type"] == kind


@pytest.mark.parametrize("kind", ["mars-adamw", "mars-lion"])
def test_elementwise_types_take_every_matrix(kind: str) -> None:
    groups = by_name(mars.param_groups(Gpt(), mars_type=kind))
    for name in ("wte.weight", "lm_head.weight", "blocks.0.attn.weight"):
        assert groups[name]["mars_type"] == kind
    assert groups["blocks.0.attn.bias"]["mars_type"] == "plain-adamw"


def test_flatten_takes_convolutions() -> None:
    groups = by_name(mars.param_groups(Gpt(), matrix_rule="flatten"))
    assert groups["conv.weight"]["name"] == "matrices"
    assert groups["conv.bias"]["name"] == "vectors"


def test_adamw_groups_get_the_1d_options_wherever_they_are_given() -> None:
    model = Gpt()
    given_here = MARS(
        mars.param_groups(
            model,
            mars_type="mars-m",
            lr=0.02,
            lr_1d=1e-3,
            betas_1d=(0.8, 0.9),
            weight_decay=0.3,
            weight_decay_1d=0.05,
        )
    )
    given_there = MARS(
        mars.param_groups(model, mars_type="mars-m"),
        lr=0.02,
        lr_1d=1e-3,
        betas_1d=(0.8, 0.9),
        weight_decay=0.3,
        weight_decay_1d=0.05,
    )
    for optimizer in (given_here, given_there):
        for group in optimizer.param_groups:
            assert group["lr"] == 0.02  # one lr for all: loops that set it move everything
            if group["mars_type"] == "plain-adamw":
                assert group["lr"] * ratio_1d(group) == pytest.approx(1e-3)
                assert group["betas"] == (0.8, 0.9)
                assert group["weight_decay"] == 0.05
            else:
                assert group["weight_decay"] == 0.3


def test_destinations_as_the_user_says() -> None:
    groups = by_name(
        mars.param_groups(
            Gpt(),
            mars_type="mars-m",
            embeddings="mars",
            head={"mars_type": "plain-adamw", "lr": 7e-4},
            vectors="no-decay",
            weight_decay_1d=0.2,
        )
    )
    assert groups["wte.weight"]["mars_type"] == "mars-m"
    assert groups["lm_head.weight"]["lr"] == 7e-4
    assert groups["lm_head.weight"]["weight_decay"] == 0.2
    assert groups["blocks.0.ln.weight"]["weight_decay"] == 0.0


def test_the_first_route_that_matches_wins() -> None:
    routes = [
        (r"blocks\.1\.", {"lr": 1e-5}),
        (r"blocks\..*attn", "adamw"),
        (lambda name, p: p.ndim == 4, "no-decay"),
        (r"attn", "mars"),
    ]
    with pytest.warns(UserWarning, match="route 3, 'attn': no parameter was left"):
        groups = mars.param_groups(Gpt(), routes=routes)
    found = by_name(groups)
    assert found["blocks.1.attn.weight"]["lr"] == 1e-5
    assert found["blocks.1.ln.bias"]["lr"] == 1e-5
    assert found["blocks.0.attn.weight"]["mars_type"] == "plain-adamw"
    assert found["conv.weight"]["weight_decay"] == 0.0
    assert found["conv.weight"]["name"].startswith("route 2")


def test_tied_weights_go_where_the_embedding_goes() -> None:
    model = Gpt()
    model.lm_head.weight = model.wte.weight
    groups = mars.param_groups(model, mars_type="mars-m")
    assert "wte.weight" in by_name(groups)
    assert sum(p is model.wte.weight for g in groups for _, p in g["params"]) == 1


def test_norms_and_biases_beside_an_embedding_are_vectors() -> None:
    """As BERT and vision transformers name them."""
    model = nn.Module()
    model.embeddings = nn.ModuleDict({"words": nn.Embedding(9, 4), "LayerNorm": nn.LayerNorm(4)})
    model.patch_embed = nn.Linear(4, 4)
    groups = mars.param_groups(model, vectors="no-decay")
    (vectors,) = (names(group) for group in groups if group["name"] == "vectors")
    assert vectors == {
        "embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias", "patch_embed.bias"
    }  # fmt: skip


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="weight has no shape yet"):
        mars.param_groups(nn.LazyLinear(4), mars_type="mars-m")


def test_a_rate_of_zero_that_others_are_measured_by_is_said(caplog) -> None:
    b = nn.Parameter(torch.zeros(3))
    mars.MARS([b], lr=0.0, lr_1d=1e-3)
    assert "lr_1d=0.001 is kept as a ratio to lr, which is 0" in caplog.text


def test_named_pairs_instead_of_a_module() -> None:
    groups = by_name(mars.param_groups(Gpt().named_parameters(), mars_type="mars-m"))
    assert groups["wte.weight"]["mars_type"] == "plain-adamw"
    p = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="'b' is also given as 'a'"):
        mars.param_groups([("a", p), ("b", p)])


def test_the_table_says_what_trains_what() -> None:
    table = str(mars.param_groups(Gpt(), mars_type="mars-m", lr=0.02))
    lines = table.splitlines()
    assert len(lines) == 1 + len(list(Gpt().parameters()))
    head = next(line for line in lines if line.startswith("lm_head.weight"))
    assert head.split()[-4:] == ["head", "plain-adamw", "lr_1d", "weight_decay_1d"]
    attention = next(line for line in lines if line.startswith("blocks.0.attn.weight"))
    assert "mars-m" in attention
    assert "0.02" in attention


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown destination 'sgd'"):
        mars.param_groups(Gpt(), head="sgd")
    with pytest.raises(ValueError, match="Invalid mars_type: 'muon'"):
        mars.param_groups(Gpt(), mars_type="muon")
    with pytest.raises(TypeError, match="Did you mean 'weight_decay'"):
        mars.param_groups(Gpt(), weight_decai=0.1)
    with pytest.raises(TypeError, match="takes a module or"):
        mars.param_groups(Gpt().parameters())
    with pytest.raises(ValueError, match="no parameters"):
        mars.param_groups(iter(()))
    with pytest.raises(TypeError, match=r"list of \(pattern, destination\) pairs"):
        mars.param_groups(Gpt(), routes={"a": "mars"})
    with pytest.raises(TypeError, match="unknown option 'rl'"):
        mars.param_groups(Gpt(), head={"rl": 0.1})
    with pytest.raises(ValueError, match="is no regular expression: missing"):
        mars.param_groups(Gpt(), routes=[("(", "mars")])
    with pytest.raises(TypeError, match=r"route re.compile\(b'h'\) must be a regular expression"):
        mars.param_groups(Gpt(), routes=[(re.compile(b"h"), "mars")])
    with pytest.raises(TypeError, match="it got NoneType"):
        mars.param_groups(None)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("transformer.wte.weight", "embeddings"),
        ("bert.embeddings.word_embeddings.weight", "embeddings"),
        ("model.pos_embed", "embeddings"),
        ("patch_embed.proj.weight", "embeddings"),
        ("vit.embeddings.patch_embeddings.projection.weight", "embeddings"),
        ("embedder.layers.0.linear1.weight", "matrices"),
        ("time_embed.0.weight", "matrices"),
        ("tok_emb.weight", "embeddings"),
        ("vision.layers.0.attn.rel_pos_h", "embeddings"),
        ("self_attn.pos_bias_u", "embeddings"),
        ("pos_encoding", "embeddings"),
        ("query_pos", "embeddings"),
        ("posembed.weight", "embeddings"),
        ("time_emb_proj.weight", "matrices"),
        ("time_embed_proj.weight", "matrices"),
        ("attention.pos_key_proj.weight", "matrices"),
        ("self_attn.linear_pos.weight", "matrices"),
        ("blocks.0.sa.heads.0.key.weight", "matrices"),
        ("heads.0.weight", "head"),
        ("1.head.weight", "head"),
        ("model.classifier.dense.weight", "head"),
        ("head.fc.weight", "head"),
        ("fc.weight", "head"),
        ("blocks.0.fc.weight", "matrices"),
        ("qa_outputs.weight", "head"),  # of Bert and some seventy others in transformers
        ("classification_head.out_proj.weight", "head"),
        ("v_head.summary.weight", "head"),
        ("mlp.experts.gate_up_proj_bias", "vectors"),  # a row an expert
        ("attention_biases", "vectors"),
        ("layers.0.attn.bias_u", "vectors"),
        ("layers.0.bias_proj.weight", "matrices"),
    ],
)
def test_roles_by_name(name: str, role: str) -> None:
    (group,) = mars.param_groups([(name, nn.Parameter(torch.ones(4, 4)))], mars_type="mars-m")
    assert group["name"] == role


def test_what_a_norm_scales_by_is_no_matrix() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.LayerNorm([6, 6]), nn.Flatten(), nn.Linear(9, 5))
    groups = mars.param_groups(model, mars_type="mars-m")
    found = {name: group["name"] for group in groups for name, _ in group["params"]}
    assert found["1.weight"] == found["1.bias"] == "vectors"
    assert found["3.weight"] == "matrices"


def test_options_of_embeddings_do_not_change_who_trains_them() -> None:
    own = {"lr": 1e-4, "weight_decay": 0.0}
    groups = mars.param_groups(Gpt(), mars_type="mars-m", embeddings=own, head=own)
    for name in ("wte.weight", "lm_head.weight"):
        group = by_name(groups)[name]
        assert (group["mars_type"], group["lr_1d"], group["weight_decay"]) == (
            "plain-adamw", 1e-4, 0.0,
        )  # fmt: skip
    groups = by_name(mars.param_groups(Gpt(), embeddings=own))
    assert groups["wte.weight"]["mars_type"] == "mars-adamw"


@pytest.mark.parametrize("given", [{}, {"lr": 0.02}])
def test_a_rate_written_into_a_group_is_its_rate(given: dict) -> None:
    groups = mars.param_groups(Gpt(), mars_type="mars-m", **given)
    (tables,) = (group for group in groups if group["name"] == "embeddings")
    tables["lr"] = 1e-5
    lines = {line.split()[0]: line.split() for line in str(groups).splitlines()}
    assert lines["wte.weight"][-2] == "1e-05"
    optimizer = MARS(groups, lr=0.02, lr_1d=3e-3)
    rates = {g["name"]: g["lr"] * ratio_1d(g) for g in optimizer.param_groups}
    assert rates["embeddings"] == pytest.approx(1e-5)
    assert rates["vectors"] == pytest.approx(3e-3)


def test_whatever_moves_lr_moves_the_rate_of_adamw() -> None:
    optimizer = MARS(mars.param_groups(Gpt(), mars_type="mars-m"), lr=0.02, lr_1d=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    optimizer.step()
    scheduler.step()
    for group in optimizer.param_groups:
        assert group["lr"] == 0.01
        assert group["lr"] * ratio_1d(group) == pytest.approx(5e-4)


def test_what_decides_the_routing_is_said_to_param_groups() -> None:
    model = Gpt()
    for name, value in (
        ("mars_type", "mars-m"),
        ("matrix_rule", "flatten"),
        ("optimize_1d", True),
    ):
        with pytest.raises(ValueError, match=f"{name}=.*give it to mars.param_groups"):
            MARS(mars.param_groups(model), **{name: value})
        MARS(mars.param_groups(model, **{name: value}), **{name: value})
    MARS(mars.param_groups(model, mars_type="mars-m"))  # the constructor's default says nothing


def test_a_slice_of_the_groups_means_the_same() -> None:
    options = {"lr": 0.02, "lr_1d": 1e-3, "weight_decay_1d": 0.3}
    groups = mars.param_groups(Gpt(), mars_type="mars-m")
    whole = MARS(groups, **options)
    listed = MARS(list(mars.param_groups(Gpt(), mars_type="mars-m")), **options)
    for a, b in zip(whole.param_groups, listed.param_groups, strict=True):
        names = ("lr", "lr_1d", "base_lr", "betas", "weight_decay", "mars_type", "name")
        assert [a[name] for name in names] == [b[name] for name in names]
        assert "routed" not in a
    later = MARS([torch.nn.Parameter(torch.ones(1))], **options)
    later.add_param_group({**groups[1], "params": [torch.nn.Parameter(torch.ones(1))]})
    late = later.param_groups[1]
    assert late["lr"] * ratio_1d(late) == pytest.approx(1e-3)


def test_the_table_prints_the_rates_that_train() -> None:
    groups = mars.param_groups(
        Gpt(), lr=0.02, lr_1d=1e-3, vectors="mars", weight_decay=0.05,
        head={"mars_type": "plain-adamw", "lr": 7e-4},
    )  # fmt: skip
    lines = {line.split()[0]: line.split() for line in str(groups).splitlines()}
    assert lines["blocks.0.ln.bias"][-3:] == ["plain-adamw", "0.001", "weight_decay_1d"]
    assert lines["lm_head.weight"][-3:] == ["plain-adamw", "0.0007", "weight_decay_1d"]
    assert lines["blocks.0.attn.weight"][-3:] == ["mars-adamw", "0.02", "0.05"]


def test_routes_are_told_apart() -> None:
    routes = [(lambda name, p: name == "wte.weight", "mars"), ("0", "adamw")]
    groups = by_name(mars.param_groups(Gpt(), mars_type="mars-m", routes=routes))
    assert groups["wte.weight"]["mars_type"] == "mars-m"
    assert groups["blocks.0.attn.weight"]["mars_type"] == "plain-adamw"


def test_a_compiled_expression_is_a_route() -> None:
    groups = mars.param_groups(Gpt(), routes=[(re.compile(r"WTE", re.IGNORECASE), "adamw")])
    routed = by_name(groups)["wte.weight"]
    assert (routed["mars_type"], routed["name"]) == ("plain-adamw", "route 0: WTE")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = nn.Linear(4, 4), nn.Linear(4, 2)


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, nn.DataParallel, lambda net: torch.compile(nn.DataParallel(net))],
    ids=["compile", "parallel", "both"],
)
def test_a_wrapped_model_is_routed_as_it_was(wrap) -> None:
    net = Net()

    def routing(model: nn.Module) -> dict:
        groups = mars.param_groups(model, mars_type="mars-m")
        return {p: group["name"] for group in groups for _, p in group["params"]}

    assert routing(net)[net.fc.weight] == "head"
    assert routing(wrap(net)) == routing(net)


def test_the_lr_of_vectors_is_their_rate() -> None:
    net = Net()
    groups = mars.param_groups(net, mars_type="mars-m", vectors={"lr": 1e-4, "weight_decay_1d": 0})
    assert "plain-adamw  0.0001" in str(groups)
    optimizer = mars.MARS(groups, lr=0.02, lr_1d=3e-3)
    before = net.fc.bias.detach().clone()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(before - net.fc.bias, torch.full((2,), 1e-4))
    for options, betas, kind in (({}, (0.5, 0.5), "plain-adamw"),
                                 ({"optimize_1d": True}, (0.5, 0.5), "mars-adamw")):  # fmt: skip
        groups = mars.param_groups(net, vectors={"betas": betas}, **options)
        (vectors,) = (group for group in groups if group["name"] == "vectors")
        assert (vectors["betas"], vectors["mars_type"]) == (betas, kind)


def test_a_rate_that_moves_with_another_says_so() -> None:
    groups = mars.param_groups(Net(), routes=[("inner", {"lr": 1e-4})])
    assert "lr_1d × 0.0001/lr" in str(groups)
    groups.append({"params": [("x", torch.zeros(3, 3))]})
    assert "x  " in str(groups)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 1.0}, "whatever lowers lr lowers that as well"),
        ({"lr": 0.02}, ""),
    ],
)
def test_a_large_lr_beside_the_default_lr_1d_is_pointed_out(
    options: dict, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    mars.MARS(Net().parameters(), **options)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_the_table_prints_that_nothing_decays() -> None:
    routes = [("bias", {"weight_decay": 0.0})]
    groups = mars.param_groups(nn.Linear(3, 3), mars_type="mars-m", routes=routes)
    lines = {line.split()[0]: line.split() for line in str(groups).splitlines()}
    assert lines["bias"][-1] == "0.0"
    (decays,) = (g["weight_decay_1d"] for g in MARS(groups).param_groups if "route" in g["name"])
    assert decays == 0.0


def test_the_table_prints_the_decay_of_vectors_that_mars_trains() -> None:
    options = {"optimize_1d": True, "weight_decay": 0.1, "weight_decay_1d": 0.0}
    model = nn.Linear(4, 4)
    groups = mars.param_groups(model, mars_type="mars-m", **options)
    (line,) = (row for row in str(groups).splitlines() if row.startswith("bias"))
    assert line.split()[-3:] == ["mars-adamw", "default", "0.1"]
    optimizer = MARS(groups, lr=1.0)
    before = model.bias.detach().clone()
    model.bias.grad = torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(model.bias.detach(), 0.9 * before)


class Wrapper(nn.Module):
    """As Lightning's modules are: they hold a model and little else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Odd(nn.Module):
    """Names that tell nothing, or only at the top."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 8)
        self.place = nn.Embedding(16, 8)
        self.mid = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)])
        setattr(self, head, nn.Linear(8, 50))


@pytest.mark.parametrize("head", ["output", "to_logits", "fc_out", "generator"])
@pytest.mark.parametrize("wrappers", [0, 1, 2])
def test_a_head_of_any_name_is_one_and_so_it_is_in_a_wrapper(head: str, wrappers: int) -> None:
    model: nn.Module = Odd(head)
    for _ in range(wrappers):
        model = Wrapper(model)
    groups = mars.param_groups(model, mars_type="mars-shampoo")
    bare = {
        name.removeprefix("model." * wrappers): g["name"] for name, g in by_name(groups).items()
    }
    assert bare[f"{head}.weight"] == "head"
    # Of the shape of a table, but of another than the largest.
    assert all(bare[f"mid.{i}.weight"] == "matrices" for i in range(3))
    assert bare["tok.weight"] == bare["place.weight"] == "embeddings"


@pytest.mark.parametrize("last", [(8, 32), (32, 8)])
def test_hidden_matrices_of_the_shape_of_the_largest_table_are_no_heads(last: tuple) -> None:
    """Two of them; or one that is not the last: a model whose head is its table, as GPT-2's is."""
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32), nn.Linear(*last))
    groups = by_name(mars.param_groups(model, mars_type="mars-m"))
    assert {groups[f"{i}.weight"]["name"] for i in (1, 2)} == {"matrices"}


class Layers(nn.Module):
    """A table, a block and an output layer, tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(32, 8)
        self.h = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(8, 32, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["head", "classifier", "output", "fc"])
def test_a_whole_model_that_is_called_a_head_keeps_its_matrices(name: str, tied: bool) -> None:
    groups = by_name(mars.param_groups(nn.ModuleDict({name: Layers(tied)}), mars_type="mars-m"))
    hidden = [f"{name}.h.{i}.{layer}.weight" for i in range(2) for layer in ("up", "down")]
    assert {groups[one]["name"] for one in hidden} == {"matrices"}
    if not tied:
        assert groups[f"{name}.lm_head.weight"]["name"] == "head"


def test_hidden_layers_of_a_head_are_matrices_and_several_heads_are_heads() -> None:
    layers = [nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)]
    model = nn.ModuleDict({
        "classifier": nn.Sequential(*layers),
        "heads": nn.ModuleDict({"kind": nn.Linear(6, 5), "box": nn.Linear(6, 4)}),
    })  # fmt: skip
    groups = by_name(mars.param_groups(model, mars_type="mars-m"))
    roles = {name: g["name"] for name, g in groups.items() if name.endswith("weight")}
    assert roles == {
        "classifier.0.weight": "matrices", "classifier.2.weight": "matrices",
        "classifier.4.weight": "head", "heads.kind.weight": "head", "heads.box.weight": "head",
    }  # fmt: skip


def test_a_layer_alone_keeps_its_name() -> None:
    groups = by_name(mars.param_groups(nn.ModuleDict({"fc": nn.Linear(4, 2)}), mars_type="mars-m"))
    assert groups["fc.weight"]["name"] == "head"


def test_experts_in_a_stack_are_matrices_if_one_says_so() -> None:
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(3, 4, 6))
    model.router = nn.Linear(4, 3, bias=False)
    routes = [("router", "adamw")]
    groups = mars.param_groups(model, mars_type="mars-m", matrix_rule="stack", routes=routes)
    assert by_name(groups)["experts"]["mars_type"] == "mars-m"
    assert by_name(groups)["router.weight"]["mars_type"] == "plain-adamw"
    apart = [nn.Parameter(expert.clone()) for expert in model.experts.detach()]
    one = MARS([model.experts], mars_type="mars-m", matrix_rule="stack", clip=None, foreach=False)
    many = MARS(apart, mars_type="mars-m", clip=None, foreach=False)
    for _ in range(3):
        model.experts.grad = torch.randn(3, 4, 6)
        for p, g in zip(apart, model.experts.grad, strict=True):
            p.grad = g
        one.step()
        many.step()
    assert torch.equal(model.experts.detach(), torch.stack([p.detach() for p in apart]))


def test_frozen_parameters_are_shown_as_such() -> None:
    model = nn.Linear(4, 2)
    model.weight.requires_grad_(False)
    assert "mars-adamw, if not frozen" in str(mars.param_groups(model))


def test_a_dict_of_parameters_is_told_from_pairs() -> None:
    with pytest.raises(TypeError, match=r"it got a dict: give its \.items\(\)"):
        mars.param_groups(dict(nn.Linear(4, 2).named_parameters()))


@pytest.mark.parametrize("count", [1, 2])
def test_layers_that_are_few_are_numbered_all_the_same(count: int) -> None:
    """Of one layer, or of the last one, which alone is trained."""
    pairs = [
        (f"layers.{i}.{name}.weight", nn.Parameter(torch.ones(4, 4)))
        for i in range(count)
        for name in ("attn", "fc", "output")
    ]
    groups = by_name(mars.param_groups(pairs, mars_type="mars-m"))
    assert {group["name"] for group in groups.values()} == {"matrices"}


def test_tables_without_a_module_of_their_own() -> None:
    """Of Mamba, Swin and ViT: no product with them, nothing to orthogonalise."""
    table = torch.zeros(9, 4)
    tables = ["mixer.A_log", "attn.relative_position_bias_table", "encoder.pos", "pos_embedding"]
    groups = by_name(mars.param_groups([(n, table.clone()) for n in [*tables, "mixer.w"]]))
    assert {name for name, group in groups.items() if group["name"] == "embeddings"} == {*tables}
    assert groups["mixer.w"]["name"] == "matrices"


def test_flattened_tables_are_no_error() -> None:
    """As FSDP1 leaves them; the optimizer says what it thinks of it."""
    model = Gpt()
    model.wte.weight = nn.Parameter(torch.zeros(80))
    assert by_name(mars.param_groups(model))["wte.weight"]["name"] == "embeddings"


def test_groups_without_names() -> None:
    groups = mars.param_groups(Gpt(), mars_type="mars-m")
    bare = MARS(groups.unnamed(), lr=1e-2, lr_1d=1e-2)
    named = MARS(groups, lr=1e-2, lr_1d=1e-2)
    assert [g["mars_type"] for g in bare.param_groups] == [
        g["mars_type"] for g in named.param_groups
    ]
    assert "param_names" in named.param_groups[0]
    assert "param_names" not in bare.param_groups[0]


def test_explain_tells_the_rates_and_decays_that_count_now() -> None:
    groups = mars.param_groups(Gpt(), mars_type="mars-shampoo", vectors="no-decay")
    optimizer = MARS(groups, lr=0.032, lr_1d=0.016, weight_decay=0.1, weight_decay_1d=0.05)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # a schedule
    head, *lines = mars.explain(optimizer).splitlines()
    assert head.startswith("group       rule          tensors  lr now  weight_decay")
    rows = [line.split() for line in lines]
    assert {tuple(row[:2] + row[3:5]) for row in rows} == {
        ("matrices", "mars-shampoo", "0.016", "0.1"),
        ("embeddings", "plain-adamw", "0.008", "0.05"),
        ("vectors", "plain-adamw", "0.008", "0"),
        ("head", "plain-adamw", "0.008", "0.05"),
    }


class Parts(nn.Module):
    """A model of named parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def names_of(groups: mars.groups.ParamGroups) -> dict[str, str]:
    return {name: group["name"] for group in groups for name, _ in group["params"]}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("cls_classifier", "head"),  # of DeiT
        ("class_labels_classifier", "head"),  # of DETR
        ("output_layer", "head"),  # of Megatron
        ("out", "head"),
        ("to_logits", "head"),
        ("embeddings_project", "matrices"),  # of Electra
        ("embedding_hidden_mapping_in", "matrices"),  # of ALBERT
    ],
)
def test_output_layers_and_layers_beside_tables_as_models_call_them(name: str, role: str) -> None:
    model = Parts(wte=nn.Embedding(9, 4), **{name: nn.Linear(4, 4, bias=False)})
    groups = mars.param_groups(model, mars_type="mars-m")
    assert names_of(groups)[f"{name}.weight"] == role


def test_parametrized_weights_are_what_the_weight_is() -> None:
    """Under weight_norm the module's weight is computed: tables went to the matrices, and so did
    the magnitudes, which an orthogonal step would have made alike.
    """
    normed = nn.utils.parametrizations.weight_norm
    model = Parts(wte=normed(nn.Embedding(9, 4)), up=normed(nn.Linear(4, 6, bias=False)))
    found = names_of(mars.param_groups(model, mars_type="mars-m"))
    prefix = "parametrizations.weight.original"
    assert found == {
        f"wte.{prefix}0": "embeddings", f"wte.{prefix}1": "embeddings",
        f"up.{prefix}0": "vectors", f"up.{prefix}1": "matrices",
    }  # fmt: skip


def test_single_rows_are_no_matrices_to_types_of_matrices() -> None:
    """The gate of a shared expert; the class token of a ViT, where convolutions are flattened."""
    model = Parts(gate=nn.Linear(4, 1, bias=False), up=nn.Linear(4, 4, bias=False))
    model.cls = nn.Parameter(torch.zeros(1, 1, 4))
    one = {"cls": "vectors", "gate.weight": "vectors", "up.weight": "matrices"}
    assert names_of(mars.param_groups(model, mars_type="mars-m", matrix_rule="flatten")) == one
    lion = names_of(mars.param_groups(model, mars_type="mars-lion"))
    assert lion == {**one, "gate.weight": "matrices"}


@pytest.mark.parametrize("given", ["head", "embeddings"])
def test_options_for_what_was_not_recognised_are_told(given: str) -> None:
    with pytest.warns(UserWarning, match=f"{given}='no-decay': no parameter was recognised"):
        mars.param_groups(nn.Linear(4, 4), mars_type="mars-m", **{given: "no-decay"})


def test_the_table_says_that_no_output_layer_was_recognised() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    said, advised = str(mars.param_groups(net, mars_type="mars-m")).splitlines()[-2:]
    assert said.startswith("No output layer was recognised. If 1.weight is one, leave it to AdamW:")
    routes = ast.literal_eval(advised.removeprefix("routes="))
    groups = mars.param_groups(net, mars_type="mars-m", routes=routes)
    assert [name for name, _ in groups[-1]["params"]] == ["1.weight"]
    for silent in (
        mars.param_groups(net),  # any type takes it
        mars.param_groups(Gpt(), mars_type="mars-m"),
        groups,
    ):
        assert "No output layer" not in str(silent)


def test_what_else_is_in_a_module_of_a_table_is_no_table() -> None:
    class Projected(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(9, 4)
            self.proj = nn.Linear(4, 4)

    found = names_of(mars.param_groups(Parts(words=Projected()), mars_type="mars-m"))
    assert found == {
        "words.weight": "embeddings", "words.proj.weight": "matrices", "words.proj.bias": "vectors",
    }  # fmt: skip
