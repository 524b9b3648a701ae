"""Numbers from the SwitchBack paper that figures show next to ours, always marked as the paper's.

Those by tokens are percentages of its layer benchmark on an A100 in fp16, dim -> 4 dim and 4 dim ->
dim together, by batch * tokens (rows) and dim (columns), recomputed from the timings released with
bitsandbytes 0.49.2 (figures 3 and 4, arXiv:2304.13013). Accuracies are read by eye from plots of a
draft.
"""

STATEMENTS = {  # its claims
    "C1": "SwitchBack int8 matches bf16 and beats LLM.int8()",
    "C2": "LLM.int8() loses accuracy, more in larger models",
    "C3": "fp8 with one scale per tensor fails, SwitchBack fp8 matches bf16",
    "C4": "zero-init layer-scale rescues that fp8; clipping and KQ norm do not",
    "C5": "features grow with depth and training; zero-init stops it",
    "C6": "the weight gradient is the product that needs 16 bits",
    "C7": "SwitchBack int8 saves 13% to 25% of the time",
    "C8": "LLM.int8() saves no time",
    "C9": "loss spikes grow with model, batch, learning rate and beta2",
    "C10": "a loss spike follows an RMS spike by 1 to 8 steps",
    "C11": "StableAdamW removes spikes and beats clipping; a lower beta2 removes them at a cost",
    "C12": "a dynamic loss scale falls at spikes; a fixed one is safe",
}
BLOCK = "visual.transformer.resblocks.{}"
BLOCKS, DEPTH = (0, 10, 20, 30), 32  # the blocks that its figures show, of ViT-H/14's
SOURCE = "paper, A100"
DIMS = (1024, 1280, 1408, 1664, 2048, 4096)
SAVED = {  # time that SwitchBack saves, % of the 16-bit layer's: the paper's speed-up
    16384: (6.0, 14.9, 19.0, 22.7, 24.8, 29.1),
    32768: (12.5, 27.0, 22.6, 24.6, 27.1, 32.0),
    65536: (16.5, 35.2, 22.2, 25.4, 28.9, 33.2),
    131072: (17.9, 29.8, 23.4, 26.4, 29.9, 33.0),
}
QUANTIZE_SHARE = {  # of SwitchBack's time, % in quantize operations
    16384: (24.5, 19.5, 18.2, 14.8, 13.4, 10.9),
    32768: (19.7, 16.8, 15.3, 12.4, 10.9, 8.4),
    65536: (17.0, 15.3, 13.3, 10.8, 9.6, 7.2),
    131072: (15.5, 14.5, 12.7, 10.4, 8.7, 6.2),
}
LARGEST_TIMED_SHARE = max(share for shares in QUANTIZE_SHARE.values() for share in shares)
ACCURACY_MODEL = "vit_h14"
EQUAL = 0.1  # points of accuracy: SwitchBack int8 matches bf16 within it
ACCURACY = {  # its zero-shot ImageNet top-1 in % by optimizer and beta2, +-0.2: figure 10
    "adamw": {0.5: 55.7, 0.8: 57.0, 0.9: 57.3, 0.95: 57.15, 0.98: 57.0},
    "adamw_clip": {0.98: 57.35, 0.99: 57.5},
    "stable_adamw": {0.98: 57.6, 0.99: 57.7},
}
END_TO_END = (13.0, 25.0)  # time that SwitchBack saves of ViT-H's training, %
LARGEST_SHARE = 20.0  # of a layer's time in quantize operations, %: "less than about"
FOLLOWING = (28, 30)  # loss spikes that follow an RMS spike, of how many
BY_CHANCE = 0.01  # the share that would
FOLLOWING_SAID = (
    f"In the paper, {FOLLOWING[0]} of {FOLLOWING[1]} loss spikes follow an RMS spike by 1 to 8 "
    f"steps, by chance about {BY_CHANCE:.0%} (arXiv:2304.13013)."
)
ACCURACY_BY_SIZE = {  # zero-shot ImageNet top-1 in %, +-0.2: figure 1; None: diverged
    "bf16": {"vit_b32": 41.7, "vit_l14": 55.1, "vit_h14": 57.6},
    "switchback": {"vit_b32": 42.0, "vit_l14": 54.8, "vit_h14": 57.0},
    "llm_int8": {"vit_b32": 38.2, "vit_l14": 48.1, "vit_h14": 51.5},
    "fp8_tensorwise": {"vit_b32": 38.2, "vit_l14": None, "vit_h14": None},
}
