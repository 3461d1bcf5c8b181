#!/usr/bin/env python3
"""A recorded case of attn_decode, from its equations in plain Python: writes attn/cache.safetensors.

Three sequences over a cache of eleven pages of five tokens, in no order; one of them is empty, one ends within a page.
Every input is a multiple of 1/64 and exact in bfloat16.
"""
import array
import json
import math
import pathlib
import random
import struct

B, TQ, P, PAGE, M, HQ, H, K, V, WINDOW = 3, 3, 11, 5, 4, 4, 2, 12, 10, 9
TABLE = [[7, 2, 9, 0], [-1, -1, -1, -1], [4, 10, 1, -1]]
LENGTHS = [20, 0, 13]


def draw(rng, shape, low, high):
    return [rng.randint(low, high) / 64 for _ in range(math.prod(shape))]


def attend(x, sink, b, i, h):
    """Row i of sequence b: logits over the keys of its window, then the weighted sum of values."""
    t, kv = LENGTHS[b] - TQ + i, h // (HQ // H)
    o = [0.0] * V
    keys, decay = [], 0.0
    for j in range(t, max(-1, t - WINDOW), -1):
        page, row = TABLE[b][j // PAGE], j % PAGE
        at = (page * PAGE + row) * H + kv
        q = x["q"][((b * TQ + i) * HQ + h) * K:][:K]
        k = x["k_cache"][at * K:][:K]
        keys.append((sum(a * c for a, c in zip(q, k)) / math.sqrt(K) + decay, x["v_cache"][at * V:][:V]))
        decay += x["g_cache"][(page * PAGE + row) * HQ + h]
    total = math.exp(sink[h]) + sum(math.exp(s) for s, _ in keys)
    for s, v in keys:
        for c in range(V):
            o[c] += math.exp(s) / total * v[c]
    return o


def main():
    rng = random.Random(5)
    shapes = {
        "q": [B, TQ, HQ, K],
        "k_cache": [P, PAGE, H, K],
        "v_cache": [P, PAGE, H, V],
        "g_cache": [P, PAGE, HQ],
        "sink_bias": [HQ],
    }
    x = {name: draw(rng, shape, -64 if name == "g_cache" else -128, 0 if name == "g_cache" else 128)
         for name, shape in shapes.items()}
    out = []
    for b in range(B):
        for i in range(TQ):
            for h in range(HQ):
                out += attend(x, x["sink_bias"], b, i, h)
    tensors = [(name, "F32", shapes[name], x[name]) for name in shapes]
    tensors += [("block_table", "I64", [B, M], sum(TABLE, [])), ("lengths", "I64", [B], LENGTHS)]
    tensors.append(("out.o", "F32", [B, TQ, HQ, V], out))
    header = {
        "__metadata__": {
            "family": "attn",
            "functions": '["attn_decode"]',
            "grad_functions": "[]",
            "scale": repr(1 / math.sqrt(K)),
            "flags": json.dumps({"scale_is_default": True, "window_size": WINDOW}),
        }
    }
    data = b""
    for name, dtype, shape, values in tensors:
        raw = array.array("f" if dtype == "F32" else "q", values).tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = pathlib.Path(__file__).parent / "attn" / "cache.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    main()
