"""Small random hybrid models: attention and layers with a state. Run as a program with a kind and a
path: PyTorch's threads would not survive a fork of the tests' process."""

import subprocess
import sys

COMMON = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}


def lfm2(transformers):
    """Short convolutions, in float32."""
    # vLLM reads names that transformers has given up.
    sizes = {"block_ff_dim": 512, "block_dim": 256, "conv_dim": 256, "conv_dim_out": 256}
    block = {"block_multiple_of": 256, "block_auto_adjust_ff_dim": False}
    return transformers.Lfm2Config(
        layer_types=["conv", "full_attention"] * 2,
        block_ffn_dim_multiplier=1.0,
        conv_bias=False,
        **COMMON | sizes | block,
    )


def qwen3_next(transformers):
    """Gated delta nets, which vLLM computes on a CPU in bfloat16 only."""
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 4}
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return transformers.Qwen3NextConfig(
        shared_expert_intermediate_size=64, **COMMON | heads | sizes | experts
    )


def make(kind, path):
    """Writes a model of a kind, such as "lfm2"."""
    subprocess.run([sys.executable, __file__, kind, str(path)], check=True)


if __name__ == "__main__":
    import torch
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(globals()[sys.argv[1]](transformers))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "conv" not in name:
                weight.normal_(0, 1.2 / weight.shape[-1] ** 0.5)
    model.float().save_pretrained(sys.argv[2])
