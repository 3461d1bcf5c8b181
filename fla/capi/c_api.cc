// The C interface over DynamicCall. Every entry catches everything: exceptions end here.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fla/core/dlpack.h"
#include "fla/core/version.h"
#include "fla/fla.h"
#include "fla/registry/dynamic.h"
#include "fla/registry/plugin.h"

struct fla_context {
  fla::Context ctx;
  explicit fla_context(fla::ContextOptions o) : ctx(std::move(o)) {}
};

struct fla_call {
  const fla::Context* ctx;
  fla::DynamicCall call;
  std::vector<fla::DynamicCall::Output> outputs;
  const char* backend = "";
  fla::PreparedCall prepared;  // of the call as it last was
  fla::Stream stream;
  bool own_stream = false;
};

namespace {

thread_local std::string t_error;

fla_code fail(fla_code code, const char* text) {
  try {
    t_error = text;
  } catch (...) {
    t_error.clear();
  }
  return code;
}

fla_code finish(const fla::Status& s) {
  return s.ok() ? FLA_OK : fail(static_cast<fla_code>(s.code()), s.message().c_str());
}

template <typename Fn>
fla_code guarded(Fn&& fn) {
  try {
    return finish(fn());
  } catch (const std::bad_alloc&) {
    return fail(FLA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return fail(FLA_INTERNAL, e.what());
  } catch (...) {
    return fail(FLA_INTERNAL, "unknown exception");
  }
}

fla::Status null_argument(const char* function, const char* name) {
  return {fla::Code::InvalidArgument, std::string(function) + ": " + name + ": expected a pointer, got NULL"};
}

// fla_context_options of 0.1.0, the first that programs were built against.
constexpr std::size_t kFirstOptionsSize = offsetof(fla_context_options, log_user) + sizeof(void*);

// The caller's options in today's struct, whatever version of it the caller was built against.
fla::Status read_options(const fla_context_options* given, fla_context_options& o) {
  const auto bad = [](const std::string& text) {
    return fla::Status(fla::Code::InvalidArgument, "fla_context_create: options." + text);
  };
  const std::size_t size = given->size;
  if (size < kFirstOptionsSize)
    return bad("size: expected at least " + std::to_string(kFirstOptionsSize) + ", got " + std::to_string(size));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof o; i < size; ++i)
    if (bytes[i] != 0)
      return bad("size: expected " + std::to_string(sizeof o) + " bytes of options, or zeros after them, got " +
                 std::to_string(size) + " with byte " + std::to_string(i) +
                 " set: an option that this version does not have");
  std::memcpy(&o, given, std::min(size, sizeof o));
  return {};
}

fla::Status set_flag(const char* function, fla_call* call, const char* name, fla::FlagValue v) {
  if (call == nullptr) return null_argument(function, "call");
  if (name == nullptr) return null_argument(function, "name");
  return call->call.set_flag(name, v);
}

fla::Status prepare(fla_call* call) {
  auto made = call->call.prepare(*call->ctx);
  if (!made) return made.status();
  call->prepared = std::move(*made);
  return {};
}

// On the prepared call, where there is one; a prepared call of other shapes, types or flags is none.
fla::Status run(fla_call* call, void* workspace, std::size_t workspace_bytes, const fla::Kept& kept) {
  const fla::RunOptions options{.workspace = {static_cast<std::byte*>(workspace), workspace_bytes},
                                .kept = kept,
                                .stream = call->own_stream ? &call->stream : nullptr};
  fla::Status s;
  if (call->prepared) {
    s = call->prepared.run(call->call.args(), options);
  } else if (workspace == nullptr && kept.memory.empty() && !call->own_stream) {
    s = call->call.run(*call->ctx);
  } else {
    // A stream or kept memory of the call's own comes with a workspace that it may have left to the library.
    if (workspace == nullptr) {
      if (s = prepare(call); s) s = call->prepared.run(call->call.args(), options);
    } else {
      s = call->call.run(*call->ctx, options);
    }
  }
  if (s) call->backend = fla::last_route().backend;
  return s;
}

}  // namespace

extern "C" {

const char* fla_version(void) { return fla::version(); }

const char* fla_build_info(const char* key) {
  const fla::BuildInfo& info = fla::build_info();
  const std::string_view wanted = key != nullptr ? key : "";
  if (wanted == "version") return info.version;
  if (wanted == "commit") return info.commit;
  if (wanted == "compiler") return info.compiler;
  if (wanted == "flags") return info.flags;
  if (wanted == "build_type") return info.build_type;
  if (wanted == "cuda") return info.cuda;
  return nullptr;
}

const char* fla_last_error(void) { return t_error.c_str(); }

fla_code fla_load_plugin(const char* path, const char** name) {
  return guarded([&]() -> fla::Status {
    if (path == nullptr) return null_argument("fla_load_plugin", "path");
    const auto plugin = fla::load_plugin(path);
    if (!plugin) return plugin.status();
    if (name != nullptr) {
      // The registry's own copy, which stays.
      const fla::Registry::Entry* e = fla::Registry::global().find(plugin->functions.front());
      for (const auto& c : e->candidates)
        if (c.backend->name == plugin->name) *name = c.backend->name.c_str();
    }
    return {};
  });
}

fla_code fla_context_create(const fla_context_options* options, fla_context** out) {
  return guarded([&]() -> fla::Status {
    if (out == nullptr) return null_argument("fla_context_create", "out");
    *out = nullptr;
    fla::ContextOptions o;
    if (options != nullptr) {
      fla_context_options given{};
      if (fla::Status s = read_options(options, given); !s) return s;
      if (given.affinity == nullptr && given.affinity_count != 0)
        return null_argument("fla_context_create", "options.affinity");
      o.threads = given.threads;
      if (given.affinity != nullptr) o.affinity.assign(given.affinity, given.affinity + given.affinity_count);
      if (given.backend != nullptr) o.backend = given.backend;
      o.stream = {given.stream, given.stream_device};
      o.check_values = given.check_values != 0;
      if (given.log != nullptr)
        o.log = [fn = given.log, user = given.log_user](const fla::LogRecord& r) {
          fn(user, r.level == fla::LogLevel::Warning ? 1 : 0, std::string(r.function).c_str(),
             std::string(r.backend).c_str(), std::string(r.message).c_str());
        };
    }
    auto made = std::make_unique<fla_context>(std::move(o));
    if (!made->ctx.status()) return made->ctx.status();
    *out = made.release();
    return {};
  });
}

void fla_context_destroy(fla_context* ctx) { delete ctx; }

fla_code fla_call_create(fla_context* ctx, const char* function, fla_call** out) {
  return guarded([&]() -> fla::Status {
    if (out == nullptr) return null_argument("fla_call_create", "out");
    *out = nullptr;
    if (ctx == nullptr) return null_argument("fla_call_create", "ctx");
    if (function == nullptr) return null_argument("fla_call_create", "function");
    auto made = fla::DynamicCall::make(ctx->ctx.registry(), function);
    if (!made) return made.status();
    *out = new fla_call{.ctx = &ctx->ctx, .call = std::move(*made), .outputs = {}, .prepared = {}, .stream = {}};
    return {};
  });
}

void fla_call_destroy(fla_call* call) { delete call; }

fla_code fla_call_set_tensor(fla_call* call, const char* name, const DLTensor* tensor) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_set_tensor", "call");
    if (name == nullptr) return null_argument("fla_call_set_tensor", "name");
    if (tensor == nullptr) return call->call.set(name, {});
    auto view = fla::from_dlpack(*tensor);
    return view ? call->call.set(name, *view) : view.status();
  });
}

fla_code fla_call_set_bool(fla_call* call, const char* name, int value) {
  return guarded([&] { return set_flag("fla_call_set_bool", call, name, value != 0); });
}
fla_code fla_call_set_int(fla_call* call, const char* name, int64_t value) {
  return guarded([&] { return set_flag("fla_call_set_int", call, name, value); });
}
fla_code fla_call_set_double(fla_call* call, const char* name, double value) {
  return guarded([&] { return set_flag("fla_call_set_double", call, name, value); });
}

fla_code fla_call_output_count(fla_call* call, size_t* count) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_output_count", "call");
    if (count == nullptr) return null_argument("fla_call_output_count", "count");
    auto list = call->call.outputs(*call->ctx);
    if (!list) return list.status();
    call->outputs = std::move(*list);
    *count = call->outputs.size();
    return {};
  });
}

fla_code fla_call_output(fla_call* call, size_t index, fla_output* out) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_output", "call");
    if (out == nullptr) return null_argument("fla_call_output", "out");
    if (index >= call->outputs.size())
      return {fla::Code::InvalidArgument, "fla_call_output: index: expected less than " +
                                              std::to_string(call->outputs.size()) +
                                              " (as fla_call_output_count said), got " + std::to_string(index)};
    const fla::DynamicCall::Output& o = call->outputs[index];
    fla::TensorView probe;
    probe.dtype = o.dtype;
    probe.ndim = 0;
    out->name = o.name.c_str();
    out->dtype = fla::to_dlpack(probe).dtype;
    out->ndim = static_cast<int>(o.shape.size());
    out->shape = o.shape.data();
    return {};
  });
}

fla_code fla_call_bind(fla_call* call, const char* output, const DLTensor* tensor) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_bind", "call");
    if (output == nullptr) return null_argument("fla_call_bind", "output");
    if (tensor == nullptr) return call->call.bind(output, {});
    auto view = fla::from_dlpack(*tensor);
    return view ? call->call.bind(output, *view) : view.status();
  });
}

fla_code fla_call_set_stream(fla_call* call, void* stream, int device) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_set_stream", "call");
    call->stream = {stream, device};
    call->own_stream = true;
    return {};
  });
}

fla_code fla_call_prepare(fla_call* call) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_prepare", "call");
    return prepare(call);
  });
}

fla_code fla_call_workspace(fla_call* call, size_t* bytes) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_workspace", "call");
    if (bytes == nullptr) return null_argument("fla_call_workspace", "bytes");
    if (call->prepared) {
      *bytes = call->prepared.workspace_bytes();
      return {};
    }
    auto need = call->call.workspace_bytes(*call->ctx);
    if (need) *bytes = *need;
    return need.status();
  });
}

fla_code fla_call_keeps(fla_call* call, size_t* bytes, uint64_t* layout) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_keeps", "call");
    if (bytes == nullptr) return null_argument("fla_call_keeps", "bytes");
    if (layout == nullptr) return null_argument("fla_call_keeps", "layout");
    if (!call->prepared)
      if (fla::Status s = prepare(call); !s) return s;
    *bytes = call->prepared.keeps_bytes();
    *layout = call->prepared.keeps_layout();
    return {};
  });
}

fla_code fla_call_run(fla_call* call, void* workspace, size_t workspace_bytes) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_run", "call");
    return run(call, workspace, workspace_bytes, {});
  });
}

fla_code fla_call_run_kept(fla_call* call, void* workspace, size_t workspace_bytes, void* kept, size_t kept_bytes,
                           uint64_t layout) {
  return guarded([&]() -> fla::Status {
    if (call == nullptr) return null_argument("fla_call_run_kept", "call");
    if (kept == nullptr) return null_argument("fla_call_run_kept", "kept");
    return run(call, workspace, workspace_bytes, {{static_cast<std::byte*>(kept), kept_bytes}, layout});
  });
}

const char* fla_call_backend(const fla_call* call) { return call != nullptr ? call->backend : ""; }

}  // extern "C"
