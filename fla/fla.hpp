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
#include "fla/ops/abc/abc.h"
#include "fla/ops/attn/attn.h"
#include "fla/ops/attnres/attnres.h"
#include "fla/ops/based/based.h"
#include "fla/ops/comba/comba.h"
#include "fla/ops/delta_rule/delta_rule.h"
#include "fla/ops/forgetting_attn/forgetting_attn.h"
#include "fla/ops/gated_delta_product/gated_delta_product.h"
#include "fla/ops/gated_delta_rule/gated_delta_rule.h"
#include "fla/ops/gated_oja_rule/gated_oja_rule.h"
#include "fla/ops/gdn2/gdn2.h"
#include "fla/ops/generalized_delta_rule/generalized_delta_rule.h"
#include "fla/ops/gla/gla.h"
#include "fla/ops/gsa/gsa.h"
#include "fla/ops/hgrn/hgrn.h"
#include "fla/ops/kda/kda.h"
#include "fla/ops/lightning_attn/lightning_attn.h"
#include "fla/ops/linear_attn/linear_attn.h"
#include "fla/ops/log_linear_attn/log_linear_attn.h"
#include "fla/ops/mesa_net/mesa_net.h"
#include "fla/ops/nsa/nsa.h"
#include "fla/ops/parallax/parallax.h"
#include "fla/ops/path_attn/path_attn.h"
#include "fla/ops/precond_gated_delta_rule/precond_gated_delta_rule.h"
#include "fla/ops/precond_kda/precond_kda.h"
#include "fla/ops/retention/retention.h"
#include "fla/ops/rwkv6/rwkv6.h"
#include "fla/ops/rwkv7/rwkv7.h"
#include "fla/ops/simple_gla/simple_gla.h"
#include "fla/ops/wall_attn/wall_attn.h"
#include "fla/registry/function.h"
