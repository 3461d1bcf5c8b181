// fla.cpp, the C++ interface. One include for everything a caller needs:
//
//   fla::Context ctx;                     // threads, logging
//   fla::GlaArgs a;                       // views of the caller's memory
//   a.q = {q, {B, T, H, K}}; ...
//   fla::Status s = fla::chunk_gla(ctx, a);
//
// Every operator is a constant of type Function<Args>: call it with or without a workspace, ask for its
// workspace_bytes, or let it explain which backend would serve a call. fla/fla.h is the same in C.
#pragma once

#include "fla/core/context.h"
#include "fla/core/dtype.h"
#include "fla/core/status.h"
#include "fla/core/tensor.h"
#include "fla/core/version.h"
#include "fla/ops/gla/gla.h"
#include "fla/ops/hgrn/hgrn.h"
#include "fla/ops/lightning_attn/lightning_attn.h"
#include "fla/ops/linear_attn/linear_attn.h"
#include "fla/ops/retention/retention.h"
#include "fla/ops/simple_gla/simple_gla.h"
#include "fla/registry/dynamic.h"
#include "fla/registry/function.h"
#include "fla/registry/registry.h"
