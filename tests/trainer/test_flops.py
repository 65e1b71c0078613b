"""FLOPs and parameters: the published check values, torch's FLOP counter on a plain model, and the real model's names."""

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from trainer.build import freeze
from trainer.config import AcConfig, CompileConfig, DataConfig, ModelConfig, RunConfig
from trainer.flops import flops_per_token, parameter_counts, peak_flops, weights
from trainer.memory.ac import apply_ac
from trainer.models.qwen3 import Qwen3

QWEN3_235B = ModelConfig(
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=12288,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
    vocab_size=151936,
)
DENSE = ModelConfig(
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,  # not hidden / heads
    intermediate_size=20,
    vocab_size=50,
)
MOE = dataclasses.replace(
    DENSE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14, decoder_sparse_step=2, num_hidden_layers=4
)
SEQ = 16


def run_of(model: ModelConfig, ac: str = "none", seq_len: int = SEQ) -> RunConfig:
    return RunConfig(model=model, ac=AcConfig(mode=ac), data=DataConfig(seq_len=seq_len))


def tied(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, tie_word_embeddings=True)


def test_reference_benchmark_has_its_published_figures():
    counts, flops = parameter_counts(QWEN3_235B), flops_per_token(run_of(QWEN3_235B, seq_len=16384))
    assert counts.active_matmul == 21_567_635_456
    assert round(counts.total / 1e9, 2) == 235.09 and round(counts.active / 1e9, 2) == 22.19
    assert flops.per_token == pytest.approx(2.8080e11, rel=1e-4)
    assert 3732 * flops.per_token / 2.25e15 == pytest.approx(0.4658, abs=5e-5)
    assert 3732 * flops.per_token_causal / 2.25e15 == pytest.approx(0.3402, abs=5e-5)
    assert 3253 * flops.per_token / 2.25e15 == pytest.approx(0.4060, abs=5e-5)


@pytest.mark.parametrize("model", [DENSE, tied(DENSE), MOE, tied(MOE), dataclasses.replace(MOE, mlp_only_layers=[1])])
def test_weights_are_those_of_the_real_model(model):
    with torch.device("meta"):
        real = Qwen3(model)
    assert sorted((w.name, w.numel) for w in weights(model)) == sorted(
        (name, parameter.numel()) for name, parameter in real.named_parameters()
    )


# A plain model: every product is an explicit matrix product, which the counter sees.


def plain_block(x_ND: torch.Tensor, layer: int, model: ModelConfig, w: dict[str, torch.Tensor]) -> torch.Tensor:
    H, G, d = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    at = f"layers.{layer}"
    normed_ND = x_ND * w[f"{at}.input_layernorm.weight"]  # enough of a norm to need the gradient
    q, k, v = (
        (normed_ND @ w[f"{at}.self_attn.{name}_proj.weight"].T).view(SEQ, heads, d).transpose(0, 1)
        for name, heads in (("q", H), ("k", G), ("v", G))
    )
    k, v = (t.repeat_interleave(H // G, dim=0) for t in (k, v))
    mixed = ((q @ k.mT).softmax(-1) @ v).transpose(0, 1).reshape(SEQ, H * d)
    x_ND = x_ND + mixed @ w[f"{at}.self_attn.o_proj.weight"].T
    if not model.is_sparse(layer):
        hidden = F.silu(x_ND @ w[f"{at}.mlp.gate_proj.weight"].T) * (x_ND @ w[f"{at}.mlp.up_proj.weight"].T)
        return x_ND + hidden @ w[f"{at}.mlp.down_proj.weight"].T
    E, K, D, I = model.num_experts, model.num_experts_per_tok, model.hidden_size, model.moe_intermediate_size
    scores, ids = (x_ND @ w[f"{at}.mlp.gate.weight"].view(E, D).T).softmax(-1).topk(K)
    gate_up = w[f"{at}.mlp.experts.gate_up_proj"].view(E, 2 * I, D)
    down = w[f"{at}.mlp.experts.down_proj"].view(E, D, I)
    y_ND = torch.zeros_like(x_ND)
    for expert in range(E):
        token, choice = torch.where(ids == expert)
        gate, up = (x_ND[token] @ gate_up[expert].T).chunk(2, dim=-1)
        y_ND = y_ND.index_add(0, token, (F.silu(gate) * up) @ down[expert].T * scores[token, choice, None])
    return x_ND + y_ND


def plain_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Random ones by name; matrices [out, in]."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for weight in weights(model):
        columns = model.hidden_size
        if weight.name.endswith("o_proj.weight"):
            columns = model.num_attention_heads * model.head_dim
        elif weight.name.endswith("mlp.down_proj.weight"):
            columns = model.intermediate_size
        flat = torch.randn(weight.numel, generator=generator) * 0.2
        made[weight.name] = (flat if weight.kind == "vector" else flat.view(-1, columns)).requires_grad_()
    return made


def counted_flops_per_token(model: ModelConfig) -> float:
    """Forward and backward of the plain model, as torch's counter sees them."""
    w = plain_weights(model)
    for name in w:
        w[name].requires_grad_(not any(fnmatch(name, pattern) for pattern in model.freeze))
    head = w["embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"]
    tokens = torch.arange(SEQ) % model.vocab_size
    with FlopCounterMode(display=False) as counter:
        x_ND = w["embed_tokens.weight"][tokens]
        for layer in range(model.num_hidden_layers):
            x_ND = plain_block(x_ND, layer, model, w)
        F.cross_entropy((x_ND * w["norm.weight"]) @ head.T, tokens).backward()
    return counter.get_total_flops() / SEQ


@pytest.mark.parametrize("model", [DENSE, tied(DENSE), MOE, tied(MOE)], ids=["dense", "dense-tied", "moe", "moe-tied"])
def test_formula_equals_torch_flop_counter(model):
    assert flops_per_token(run_of(model)).per_token == counted_flops_per_token(model)


# The real model: the counter is told what it does not know, the grouped product and the CPU's attention.


def grouped_flops(x_shape, weight_shape, *args, out_shape=None, **kwargs) -> int:
    """Of rows grouped by expert, or of their weight gradient: rows x in x out."""
    return 2 * x_shape[0] * x_shape[1] * weight_shape[-1]


def attention_flops(q_shape, *args, out_shape=None, **kwargs) -> int:
    B, H, S, d = q_shape
    return 4 * B * H * S * S * d


FORWARD_FLOPS = {
    torch.ops.moe.grouped_mm: grouped_flops,
    torch.ops.moe.grouped_mm_weight: grouped_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
}


def real_model(model: ModelConfig, ac: str, dtype: torch.dtype = torch.float32) -> Qwen3:
    real = Qwen3(model).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in real.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    freeze(real, model)
    apply_ac(real, ac)
    return real


def executed_by_real_model(model: ModelConfig, ac: str) -> float:
    """FLOPs per token of an eager step, its attention backward left out."""
    real, ids = real_model(model, ac), torch.arange(SEQ)[None] % model.vocab_size
    with FlopCounterMode(display=False, custom_mapping=FORWARD_FLOPS) as counter:
        real(ids, ids, None, ids)[0].backward()
    return counter.get_total_flops() / SEQ


def attention_twice_over(model: ModelConfig, layers: int) -> float:
    """What the counter adds to the causal count of one more attention forward pass: it counts it in full."""
    return 2 * layers * model.num_attention_heads * model.head_dim * SEQ


# The grouped kernels want rows of 16 bytes.
WIDE = dataclasses.replace(MOE, hidden_size=32, head_dim=16, intermediate_size=24, moe_intermediate_size=16)


# Nothing below layer 1 is trained: backward does not get there, and nothing is computed again.
UPPER = dataclasses.replace(WIDE, freeze=["embed_tokens.weight", "layers.0.*"])


@pytest.mark.parametrize(
    "model", [dataclasses.replace(WIDE, num_experts=0), WIDE, UPPER], ids=["dense", "moe", "moe_upper"]
)
@pytest.mark.parametrize("ac", ["selective", "full"])
def test_hfu_counts_what_the_eager_model_executes_again(model, ac):
    eager = {
        mode: dataclasses.replace(run_of(model, mode), compile=CompileConfig(mode="none")) for mode in ("none", ac)
    }
    formula = {mode: flops_per_token(config).per_token_executed for mode, config in eager.items()}
    counted = executed_by_real_model(model, ac) - executed_by_real_model(model, "none")
    layers = model.num_hidden_layers - bool(model.freeze)
    assert formula[ac] - formula["none"] == counted - (attention_twice_over(model, layers) if ac == "full" else 0)


def products_in_compiled_backward(model: ModelConfig, ac: str) -> Counter[str]:
    """Matrix products and attention forward passes in the backward graphs that inductor's partitioner makes."""
    found = Counter()

    def count(graph: torch.fx.GraphModule, inputs) -> Callable:
        for node in graph.graph.nodes:
            operators = [node.target, *node.args]  # attention is an argument of the operator that keeps the RNG state
            found.update(str(op) for op in operators if isinstance(op, torch._ops.OpOverload))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    real, ids = real_model(model, ac, torch.bfloat16), torch.arange(SEQ)[None] % model.vocab_size
    for block in real.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=backend)
    real(ids, ids, None, ids)[0].backward()
    return found


@pytest.mark.filterwarnings("ignore")
def test_hfu_counts_what_a_compiled_model_executes_again():
    """full: 4 attention GEMMs and the router, or gate and up; then the experts' first product; and attention."""
    model = dataclasses.replace(WIDE, num_hidden_layers=2)
    none, full = (products_in_compiled_backward(model, ac) for ac in ("none", "full"))
    added = {name.split(".")[1]: full[name] - none[name] for name in full if full[name] > none[name]}
    assert added["mm"] == (4 + 1) + (4 + 2)
    assert added["grouped_mm"] == 1 and "grouped_mm_weight" not in added
    assert added["_scaled_dot_product_flash_attention_for_cpu"] == 2

    D, I, K = model.hidden_size, model.moe_intermediate_size, model.num_experts_per_tok
    attention_weights = 2 * (64 + 32) * D
    forward = 2 * (2 * attention_weights + D * 6 + 2 * D * 24 + K * 2 * I * D) + attention_twice_over(model, 2)
    full, none = flops_per_token(run_of(model, "full")), flops_per_token(run_of(model, "none"))
    assert full.per_token_executed - none.per_token_executed == forward
    selective = flops_per_token(run_of(model, "selective"))
    assert selective.per_token_executed - none.per_token_executed == 2 * K * 2 * I * D


def test_recomputation_is_in_no_mfu():
    flops = [flops_per_token(run_of(MOE, ac)) for ac in ("none", "selective", "full")]
    assert len({(f.per_token, f.per_token_causal) for f in flops}) == 1
    assert flops[0].per_token_executed < flops[1].per_token_executed < flops[2].per_token_executed


def test_embedding_lookup_is_free_and_the_head_is_not():
    more = dataclasses.replace(MOE, vocab_size=MOE.vocab_size + 1)
    for change in (lambda m: m, tied):
        extra = flops_per_token(run_of(change(more))).per_token - flops_per_token(run_of(change(MOE))).per_token
        assert extra == 6 * MOE.hidden_size
    assert parameter_counts(MOE).active_matmul == parameter_counts(tied(MOE)).active_matmul
    assert parameter_counts(MOE).total - parameter_counts(tied(MOE)).total == MOE.vocab_size * MOE.hidden_size


def test_dense_layers_of_a_mixture_are_priced_as_dense():
    """Layer i is sparse if (i + 1) % decoder_sparse_step == 0 and it is not in mlp_only_layers."""
    sparse = dataclasses.replace(MOE, decoder_sparse_step=1)
    for layers, change in ((4, {}), (2, {"decoder_sparse_step": 2}), (3, {"mlp_only_layers": [0]})):
        counts = parameter_counts(dataclasses.replace(sparse, **change))
        assert counts.experts == layers * 6 * 3 * 24 * 14
        per_layer = 2 * 3 * 24 * 14 + 6 * 24
        attention = 4 * (2 * 40 + 2 * 20) * 24
        assert counts.active_matmul == layers * per_layer + (4 - layers) * 3 * 24 * 20 + attention + 50 * 24


def test_packed_documents_attend_to_themselves_only():
    whole, packed = flops_per_token(run_of(MOE)), flops_per_token(run_of(MOE), [4, 4, 8])
    matmul = 6 * parameter_counts(MOE).active_matmul
    assert packed.per_token == whole.per_token  # the reference benchmark's convention does not know documents
    assert packed.per_token_causal - matmul == pytest.approx((whole.per_token_causal - matmul) * 96 / SEQ**2)


@pytest.mark.parametrize(
    "patterns",
    [
        ["layers.2.*"],  # it still passes the gradient on to those below
        ["embed_tokens.weight"],
        ["embed_tokens.weight", "layers.0.*", "layers.1.*"],
        ["embed_tokens.weight", "layers.*"],
        ["embed_tokens.weight", "layers.*", "norm.weight"],
        ["lm_head.weight", "*experts*"],
    ],
)
def test_gradients_that_nothing_needs_are_not_counted(patterns):
    """The counter sees them missing too: of frozen matrices, and all below the first layer with something to train."""
    model = dataclasses.replace(MOE, freeze=patterns)
    assert flops_per_token(run_of(model)).per_token == counted_flops_per_token(model)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA B300 SXM6 AC", 2.25e15),
        ("NVIDIA GB300", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("AMD Instinct MI325X OAM", 1307.4e12),
        ("NVIDIA H200 MIG 1g.18gb", None),  # a slice is not the device
        ("NVIDIA H100", None),
        ("Foo", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peak_is_known_for_exact_names_only(name, peak):
    assert peak_flops(name) == peak


def test_importing_it_needs_no_torch():
    code = "import sys, trainer.flops; sys.exit(bool({'torch', 'hydra', 'wandb', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
