#!/usr/bin/env python3
"""Times fla.cpp and FLA's Triton operators in one process, in turns, on the same tensors of one GPU.

usage: compare-fla.py LIBFLA.so OUT.json [--ops NAMES] [--shapes NAMES] [--modes fwd,fwdbwd] [--seconds N]
       compare-fla.py --prepare [--ops NAMES] [--shapes NAMES]

Needs torch, triton and einops, and the packages fla-core and flash-linear-attention, which compile and tune in the first
call for minutes. --prepare only compiles what FLA's tuning will ask for, into Triton's cache: several processes may do it at
once, one for each operator and shape, and the run that follows tunes by itself in seconds. Both sides are timed by triton.testing.do_bench (events on the device, the cache cleared before each call).
Beside the times: the error R of every output and gradient of both against fla.cpp's reference in double on a smaller
shape, the extra memory of a call, its first call, the time that a call keeps the CPU.

FLA refuses its gated backward on Triton 3.4.0 to 3.7.0 on Hopper, whose compiler makes it wrong; it is timed all the same
and marked.
"""
import argparse
import ctypes as c
import importlib
import json
import os
import time

try:
    import torch
    import torch.nn.functional as F
    import triton
except ImportError as e:
    raise SystemExit(f'compare-fla: needs torch and triton beside FLA: {e}')

SHAPES = {
    'B1_T8192_H96_D128': (1, 8192, 96, 128), 'B2_T16384_H16_D128': (2, 16384, 16, 128),
    'B4_T4096_H64_D128': (4, 4096, 64, 128), 'B4_T2048_H16_D128': (4, 2048, 16, 128),
    'B8_T1024_H8_D64': (8, 1024, 8, 64),
}
WIDE, HEAD = ('B', 'T', 'H', 'D'), ('B', 'T', 'H')
QKV = {'q': (WIDE, lambda x: x), 'k': (WIDE, lambda x: x), 'v': (WIDE, lambda x: x)}
BETA = {'beta': (HEAD, torch.sigmoid)}
# Name here: FLA's module and function, inputs, flags that both take, and what FLA asks for besides.
OPS = {
    'chunk_linear_attn': ('linear_attn', 'chunk_linear_attn', QKV, {}),
    'chunk_retention': ('retention', 'chunk_retention', QKV, {}),
    'chunk_lightning_attn': ('lightning_attn', 'chunk_lightning_attn', QKV, {'layer_idx': 0, 'num_layers': 12}),
    'chunk_simple_gla': ('simple_gla', 'chunk_simple_gla', QKV | {'g': (HEAD, F.logsigmoid)}, {}),
    'chunk_gla': ('gla', 'chunk_gla', QKV | {'g': (WIDE, lambda x: F.logsigmoid(x).clamp_min(-5))}, {}),
    'chunk_gdn': ('gated_delta_rule', 'chunk_gated_delta_rule', QKV | {'g': (HEAD, F.logsigmoid)} | BETA,
                  {'use_qk_l2norm_in_kernel': True}),
    'chunk_kda': ('kda', 'chunk_kda', QKV | {'g': (WIDE, F.logsigmoid)} | BETA,
                  {'use_qk_l2norm_in_kernel': True, 'safe_gate': True}, {'lower_bound': -5}),
}
SMALL = (1, 500, 16, 128)  # for the errors


class Device(c.Structure):
    _fields_ = [('type', c.c_int32), ('id', c.c_int32)]


class DataType(c.Structure):
    _fields_ = [('code', c.c_uint8), ('bits', c.c_uint8), ('lanes', c.c_uint16)]


class Tensor(c.Structure):
    _fields_ = [('data', c.c_void_p), ('device', Device), ('ndim', c.c_int32), ('dtype', DataType),
                ('shape', c.POINTER(c.c_int64)), ('strides', c.POINTER(c.c_int64)), ('byte_offset', c.c_uint64)]


class Options(c.Structure):
    _fields_ = [('size', c.c_size_t), ('threads', c.c_int), ('affinity', c.c_void_p), ('affinity_count', c.c_size_t),
                ('backend', c.c_char_p), ('log', c.c_void_p), ('log_user', c.c_void_p), ('stream', c.c_void_p),
                ('stream_device', c.c_int), ('check_values', c.c_int)]


class Output(c.Structure):
    _fields_ = [('name', c.c_char_p), ('dtype', DataType), ('ndim', c.c_int), ('shape', c.POINTER(c.c_int64))]


TYPES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64)}


class Library:
    def __init__(self, path):
        self.so = c.CDLL(path)
        self.so.fla_last_error.restype = self.so.fla_build_info.restype = c.c_char_p
        self.so.fla_call_run.argtypes = [c.c_void_p, c.c_void_p, c.c_size_t]
        self.contexts = {}

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.so.fla_last_error().decode())

    def context(self, backend):
        if backend not in self.contexts:
            o = Options(size=c.sizeof(Options), backend=backend)
            ctx = c.c_void_p()
            self.check(self.so.fla_context_create(c.byref(o), c.byref(ctx)))
            self.contexts[backend] = ctx
        return self.contexts[backend]


class Call:
    """One call, forward or backward, bound to torch tensors; run() starts it on the default stream."""

    def __init__(self, lib, backend, function, tensors, flags):
        self.lib, self.kept, self.outputs = lib, [], {}
        self.call = c.c_void_p()
        lib.check(lib.so.fla_call_create(lib.context(backend), function.encode(), c.byref(self.call)))
        device = None
        for name, t in tensors.items():
            device = t.device
            lib.check(lib.so.fla_call_set_tensor(self.call, name.encode(), c.byref(self.tensor(t))))
        for name, value in flags.items():
            if isinstance(value, bool):
                lib.check(lib.so.fla_call_set_bool(self.call, name.encode(), int(value)))
            elif isinstance(value, int):
                lib.check(lib.so.fla_call_set_int(self.call, name.encode(), c.c_int64(value)))
            else:
                lib.check(lib.so.fla_call_set_double(self.call, name.encode(), c.c_double(value)))
        count = c.c_size_t()
        lib.check(lib.so.fla_call_output_count(self.call, c.byref(count)))
        shapes = []
        for i in range(count.value):
            o = Output()
            lib.check(lib.so.fla_call_output(self.call, c.c_size_t(i), c.byref(o)))
            dtype = next(t for t, code in TYPES.items() if code == (o.dtype.code, o.dtype.bits))
            shapes.append((o.name.decode(), dtype, [o.shape[k] for k in range(o.ndim)]))
        for name, dtype, shape in shapes:
            t = self.outputs[name] = torch.empty(shape, dtype=dtype, device=device)
            lib.check(lib.so.fla_call_bind(self.call, name.encode(), c.byref(self.tensor(t))))
        size = c.c_size_t()
        lib.check(lib.so.fla_call_workspace(self.call, c.byref(size)))
        self.workspace_bytes = size.value
        self.workspace = torch.empty(max(size.value, 1), dtype=torch.uint8, device=device)
        self.address = self.workspace.data_ptr()

    def tensor(self, t):
        code, bits = TYPES[t.dtype]
        n = t.dim()
        t = t.detach()
        made = Tensor(t.data_ptr(), Device(2 if t.is_cuda else 1, 0), n, DataType(code, bits, 1),
                      (c.c_int64 * n)(*t.shape), (c.c_int64 * n)(*t.stride()), 0)
        self.kept += [t, made]
        return made

    def run(self):
        if self.lib.so.fla_call_run(self.call, self.address, self.workspace_bytes) != 0:
            raise RuntimeError(self.lib.so.fla_last_error().decode())

    def __del__(self):
        self.lib.so.fla_call_destroy(self.call)


class Ours:
    def __init__(self, lib, op, x, do, flags, mode, backend=None):
        self.forward = Call(lib, backend, op, x, flags)
        self.calls = [self.forward]
        if mode == 'fwdbwd':
            self.calls.append(Call(lib, backend, op + '_backward', x | {'grad_out.o': do}, flags))

    def run(self):
        for call in self.calls:
            call.run()

    def results(self):
        return {k: v for call in self.calls for k, v in call.outputs.items()}

    def extra(self):
        return max(call.workspace_bytes for call in self.calls)


def inputs_of(op, sizes, dtype, device):
    torch.manual_seed(42)
    size = dict(zip('BTHD', sizes))
    return {n: make(torch.randn([size[d] for d in rule], device=device)).to(dtype)
            for n, (rule, make) in OPS[op][2].items()}


def first_of(r):
    return r[0] if isinstance(r, tuple) else r


def fla_function(op):
    module, name, _, flags, *more = OPS[op]
    fn = getattr(importlib.import_module(f'fla.ops.{module}'), name)
    flags = flags | (more[0] if more else {})
    return lambda x: first_of(fn(**x, **flags))


def host_ms(fn, n=20):
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(n):
        fn()
    spent = (time.perf_counter() - t) / n * 1e3
    torch.cuda.synchronize()
    return spent


def errors(lib, op, mode):
    """R of both sides against double, by output."""
    x = inputs_of(op, SMALL, torch.bfloat16, 'cuda')
    o = fla_function(op)(x)
    do = torch.randn_like(o)
    wide = {k: v.double().cpu() for k, v in x.items()}
    exact = Ours(lib, op, wide, do.double().cpu(), OPS[op][3], mode, b'reference')
    exact.run()
    mine = Ours(lib, op, x, do, OPS[op][3], mode)
    mine.run()
    theirs = {'out.o': o}
    if mode == 'fwdbwd':
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        grads = torch.autograd.grad(fla_function(op)(leaves), list(leaves.values()), do, allow_unused=True)
        theirs |= {f'grad.{k}': g for k, g in zip(leaves, grads)}
    torch.cuda.synchronize()
    found = {}
    for name, want in exact.results().items():
        if theirs.get(name) is None:
            continue
        def r(got):
            return ((got.double().cpu() - want).norm() / want.norm()).item()
        found[name] = {'ours': r(mine.results()[name]), 'fla': r(theirs[name])}
    return found


def tune_with(bench):
    from triton.runtime.autotuner import Autotuner
    Autotuner.do_bench = property(lambda _: bench)


def prepare(a):
    """Each configuration of each kernel runs once, and none is kept as the best."""
    def once(call, quantiles):
        call()
        return [1.0] * 3
    tune_with(once)
    for op in a.ops.split(','):
        for shape in a.shapes.split(','):
            B, T, H, D = SHAPES[shape]
            x = inputs_of(op, (1, min(T, 2048), H, D), torch.bfloat16, 'cuda')
            with torch.no_grad():
                fla_function(op)(x)
            leaves = {k: v.requires_grad_() for k, v in x.items()}
            o = fla_function(op)(leaves)
            torch.autograd.grad(o, list(leaves.values()), torch.randn_like(o), allow_unused=True)
            torch.cuda.synchronize()


def main(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument('library', nargs='?')
    p.add_argument('out', nargs='?')
    p.add_argument('--prepare', action='store_true')
    p.add_argument('--ops', default=','.join(OPS))
    p.add_argument('--shapes', default=','.join(SHAPES))
    p.add_argument('--modes', default='fwd')
    p.add_argument('--seconds', type=float, default=1e9)
    a = p.parse_args(argv)
    for name, known in (('ops', OPS), ('shapes', SHAPES), ('modes', ('fwd', 'fwdbwd'))):
        for x in getattr(a, name).split(','):
            if x not in known:
                p.error(f"--{name}: expected {', '.join(known)}, got '{x}'")
    if not a.prepare and a.out is None:
        p.error('LIBFLA.so and OUT.json: expected both')
    if not a.prepare and not os.path.isfile(a.library):
        p.error(f'LIBFLA.so: there is no file {a.library}')
    if a.prepare:
        os.environ.setdefault('FLA_CACHE_RESULTS', '0')  # before FLA is imported
    refuses = False
    try:
        chunk_o = importlib.import_module('fla.ops.common.chunk_o')
        refuses = bool(chunk_o.IS_NVIDIA_HOPPER and chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1)
        chunk_o.TRITON_ABOVE_3_4_0 = False
    except (ImportError, AttributeError):
        pass
    if a.prepare:
        prepare(a)
        return
    start = time.time()
    lib = Library(a.library)
    torch.cuda.synchronize()
    tune_with(lambda call, quantiles: triton.testing.do_bench(call, warmup=5, rep=30, quantiles=quantiles))
    rows = []
    for op in a.ops.split(','):
        for shape in a.shapes.split(','):
            for mode in a.modes.split(','):
                if time.time() - start > a.seconds:
                    raise SystemExit(f'compare-fla: the time is over before {op} {shape} {mode}')
                row = {'op': op, 'shape': shape, 'mode': mode, 'commit': lib.so.fla_build_info(b'commit').decode()}
                try:
                    x = inputs_of(op, SHAPES[shape], torch.bfloat16, 'cuda')
                    do = torch.randn_like(x['v'])
                    mine = Ours(lib, op, x, do, OPS[op][3], mode)
                    torch.cuda.synchronize()
                    t = time.perf_counter()
                    mine.run()
                    torch.cuda.synchronize()
                    row['first_call_ms'] = (time.perf_counter() - t) * 1e3
                    tensors = list(x.values()) + list(mine.results().values()) + ([do] if mode == 'fwdbwd' else [])
                    row['extra_share'] = mine.extra() / sum(t.numel() * t.element_size() for t in tensors)
                    theirs = fla_function(op)
                    leaves = {k: v.detach().requires_grad_() for k, v in x.items()}

                    def forward():
                        with torch.no_grad():
                            return theirs(x)

                    def both():
                        return torch.autograd.grad(theirs(leaves), list(leaves.values()), do, allow_unused=True)
                    run = forward if mode == 'fwd' else both
                    t = time.time()  # tuning and all
                    run()
                    torch.cuda.synchronize()
                    row['fla_first_call_s'] = time.time() - t
                    sides = {'ours': mine.run, 'fla': run}
                    times = {'ours': [], 'fla': []}
                    for _ in range(3):  # in turns
                        for who, fn in sides.items():
                            times[who].append(triton.testing.do_bench(fn, warmup=20, rep=100, quantiles=[.5, .2, .8]))
                    for who, fn in sides.items():
                        row[who] = {'ms': sorted(t[0] for t in times[who])[1], 'all': times[who], 'host_ms': host_ms(fn)}
                    row['ratio'] = row['fla']['ms'] / row['ours']['ms']
                    row['fla_refuses'] = refuses and mode == 'fwdbwd'
                    if shape == a.shapes.split(',')[0]:
                        row['R'] = errors(lib, op, mode)
                    print(f"{op:20s} {shape:20s} {mode:7s} fla.cpp {row['ours']['ms']:8.3f} ms  FLA {row['fla']['ms']:8.3f} ms  "
                          f"{row['ratio']:6.2f} x  host {row['ours']['host_ms']:.3f} / {row['fla']['host_ms']:.3f} ms  "
                          f"extra {row['extra_share']:.2f}  first {row['first_call_ms']:.1f} ms", flush=True)
                    for name, r in row.get('R', {}).items():
                        print(f"    R {name:12s} fla.cpp {r['ours']:.2e}  FLA {r['fla']:.2e}", flush=True)
                except Exception as e:  # the other rows are still wanted
                    row['error'] = repr(e)[:400]
                    print(op, shape, mode, 'FAILED', row['error'], flush=True)
                rows.append(row)
                with open(a.out, 'w') as f:
                    json.dump({'gpu': torch.cuda.get_device_name(), 'torch': torch.__version__,
                               'triton': triton.__version__, 'rows': rows}, f, indent=1)
                x = do = mine = leaves = None
                torch.cuda.empty_cache()
    if any('error' in row for row in rows):
        raise SystemExit('compare-fla: rows failed')


if __name__ == '__main__':
    main()
