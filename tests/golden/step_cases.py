#!/usr/bin/env python3
"""Recorded cases of the step functions, from their equations in plain Python: writes <family>/step_pool.safetensors.

Three sequences of three tokens over a pool of twelve slots: a slot per token, starts from the second and the fourth
column, one sequence of padding. Every input is a multiple of 1/64 and exact in bfloat16.
"""
import array
import json
import math
import pathlib
import random
import struct

B, T, H, K, V, P, S = 3, 3, 2, 16, 12, 12, 4
TABLE = [[9, 3, 0, 7], [-1, -1, -1, -1], [4, 11, 2, 6]]
ACCEPTED = [2, 1, 4]


def draw(rng, shape, low, high):
    return [rng.randint(low, high) / 64 for _ in range(math.prod(shape))]


class Tensor:
    def __init__(self, shape, data):
        self.shape, self.data = list(shape), list(data)

    def __getitem__(self, index):
        return self.data[self.at(index)]

    def __setitem__(self, index, value):
        self.data[self.at(index)] = value

    def at(self, index):
        offset = 0
        for size, i in zip(self.shape, index):
            offset = offset * size + i
        return offset


def step(family, x, flags, S0, b, t, h):
    """The state after token t."""
    k = [x["k"][b, t, h, i] for i in range(K)]
    v = [x["v"][b, t, h, j] for j in range(V)]
    if family == "rwkv7":
        a = [x["a"][b, t, h, i] for i in range(K)]
        w = [math.exp(x["w"][b, t, h, i]) for i in range(K)]
        read = [sum(a[i] * S0[i][j] for i in range(K)) for j in range(V)]
        return [[w[i] * S0[i][j] + x["b"][b, t, h, i] * read[j] + k[i] * v[j] for j in range(V)] for i in range(K)]
    decay = [1.0] * K
    if family in ("gated_delta_rule", "simple_gla"):
        decay = [math.exp(x["g"][b, t, h])] * K
    elif family == "kda":
        decay = [math.exp(x["g"][b, t, h, i]) for i in range(K)]
    elif family == "gla":
        decay = [math.exp(x["gk"][b, t, h, i]) for i in range(K)]
    elif family == "rwkv6":
        decay = [math.exp(x["w"][b, t, h, i]) for i in range(K)]
    elif family == "lightning_attn":
        decay = [math.exp(-(8 / H) * (1 - flags["layer_idx"] / flags["num_layers"]) * h)] * K
    D = [[decay[i] * S0[i][j] for j in range(V)] for i in range(K)]
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        beta = x["beta"][b, t, h]
        v = [beta * (v[j] - sum(D[i][j] * k[i] for i in range(K))) for j in range(V)]
    return [[D[i][j] + k[i] * v[j] for j in range(V)] for i in range(K)]


FAMILIES = {
    "gated_delta_rule": ("gdn_step", {"g": (B, T, H), "beta": (B, T, H)}, {}),
    "kda": ("kda_step", {"g": (B, T, H, K), "beta": (B, T, H)}, {}),
    "gla": ("gla_step", {"gk": (B, T, H, K)}, {}),
    "rwkv6": ("rwkv6_step", {"w": (B, T, H, K), "u": (H, K)}, {}),
    "rwkv7": ("rwkv7_step", {"w": (B, T, H, K), "a": (B, T, H, K), "b": (B, T, H, K)}, {}),
    "delta_rule": ("delta_step", {"beta": (B, T, H)}, {}),
    "lightning_attn": ("lightning_step", {}, {"layer_idx": 3, "num_layers": 12}),
    "simple_gla": ("simple_gla_step", {"g": (B, T, H)}, {}),
}
RANGES = {"g": (-48, 0), "gk": (-48, 0), "w": (-48, 0), "beta": (4, 60), "a": (-12, 12), "b": (-12, 12),
          "u": (-64, 64)}


def write(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, t) in tensors.items():
        raw = array.array("q" if dtype == "I64" else "f", t.data).tobytes()
        header[name] = {"dtype": dtype, "shape": t.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def record(family, function, extra, flags):
    rng = random.Random(function)
    query = "r" if family in ("rwkv6", "rwkv7") else "q"
    x = {query: Tensor((B, T, H, K), draw(rng, (B, T, H, K), -64, 64)),
         "k": Tensor((B, T, H, K), draw(rng, (B, T, H, K), -16, 16)),
         "v": Tensor((B, T, H, V), draw(rng, (B, T, H, V), -64, 64))}
    for name, shape in extra.items():
        x[name] = Tensor(shape, draw(rng, shape, *RANGES[name]))
    state = Tensor((P, H, K, V), draw(rng, (P, H, K, V), -64, 64))
    after = Tensor(state.shape, state.data)
    o = Tensor((B, T, H, V), [0.0] * (B * T * H * V))
    steps = Tensor((B, T, H, K, V), [0.0] * (B * T * H * K * V))
    scale = 1 / math.sqrt(K)
    for b in range(B):
        if TABLE[b][0] < 0:
            continue
        for h in range(H):
            start = TABLE[b][ACCEPTED[b] - 1]
            now = [[state[start, h, i, j] for j in range(V)] for i in range(K)]
            for t in range(T):
                read = now
                now = step(family, x, flags, now, b, t, h)
                if family == "rwkv6":  # the state before the token, and the token itself through its bonus
                    read = [[read[i][j] + x["u"][h, i] * x["k"][b, t, h, i] * x["v"][b, t, h, j] for j in range(V)]
                            for i in range(K)]
                else:
                    read = now
                for j in range(V):
                    o[b, t, h, j] = scale * sum(read[i][j] * x[query][b, t, h, i] for i in range(K))
                    for i in range(K):
                        steps[b, t, h, i, j] = after[TABLE[b][t], h, i, j] = now[i][j]
    tensors = {name: ("F32", t) for name, t in x.items()}
    tensors["state"] = ("F32", state)
    tensors["state_indices"] = ("I64", Tensor((B, S), [slot for row in TABLE for slot in row]))
    tensors["num_accepted_tokens"] = ("I64", Tensor((B,), ACCEPTED))
    tensors |= {"out.o": ("F32", o), "out.state_out": ("F32", after), "out.step_states": ("F32", steps)}
    flags = flags | {"scale_is_default": True, "output_step_states": True}
    folder = pathlib.Path(__file__).parent / family
    write(folder / "step_pool.safetensors", tensors,
          {"family": family, "functions": json.dumps([function]), "grad_functions": "[]", "scale": repr(scale),
           "flags": json.dumps(flags)})


for name, (function, extra, flags) in FAMILIES.items():
    record(name, function, extra, flags)
