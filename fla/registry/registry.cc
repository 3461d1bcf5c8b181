#include "fla/registry/registry.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace fla {

void register_all(Registry& r);  // generated: every family, in name order

Registry& Registry::instance() {
  static Registry* const made = [] {
    auto* r = new Registry;  // never destroyed: calls may come from static destructors
    register_all(*r);
    return r;
  }();
  return *made;
}

const Registry& Registry::global() { return instance(); }

void Registry::add_function(FunctionSpec spec) {
  const std::string name = spec.name, operation = spec.operation;
  functions_[name].spec = std::move(spec);
  rebuild(operation);
}

void Registry::add_backend(const std::string& operation, Backend backend) {
  backend.order = next_order_++;
  auto& list = backends_[operation];
  const auto old = std::find_if(list.begin(), list.end(), [&](const Backend& b) { return b.name == backend.name; });
  if (old != list.end())
    *old = std::move(backend);
  else
    list.push_back(std::move(backend));
  rebuild(operation);
}

Status Registry::add_kernel(ErasedKernel kernel) {
  const std::string function = kernel.function;
  auto& list = kernels_[{function, kernel.backend}];
  for (const ErasedKernel& k : list)
    if (k.name == kernel.name) {
      refused_.push_back("kernel " + kernel.name + " of backend " + kernel.backend + " for " + function +
                         " was registered twice; the first one stays");
      return {Code::InvalidArgument, refused_.back()};
    }
  list.push_back(std::move(kernel));
  const auto f = functions_.find(function);
  if (f != functions_.end()) rebuild(f->second.spec.operation);
  return {};
}

void Registry::rebuild(const std::string& operation) {
  std::vector<const Backend*> order;
  for (const Backend& b : backends_[operation]) order.push_back(&b);
  std::sort(order.begin(), order.end(), [](const Backend* a, const Backend* b) {
    return a->priority != b->priority ? a->priority < b->priority : a->order < b->order;
  });
  for (auto& [name, entry] : functions_) {
    if (entry.spec.operation != operation) continue;
    entry.candidates.clear();
    for (const Backend* b : order) {
      const auto k = kernels_.find({name, b->name});
      if (k == kernels_.end()) {
        entry.candidates.push_back({b, nullptr});
      } else {
        for (const ErasedKernel& one : k->second) entry.candidates.push_back({b, &one});
      }
    }
    const auto ref = kernels_.find({name, kReference});
    entry.reference = ref == kernels_.end() ? nullptr : &ref->second.front();
  }
}

const Registry::Entry* Registry::find(std::string_view function) const {
  const auto it = functions_.find(function);
  return it == functions_.end() ? nullptr : &it->second;
}

std::vector<const Registry::Entry*> Registry::entries() const {
  std::vector<const Entry*> all;
  for (const auto& [name, e] : functions_) all.push_back(&e);
  return all;
}

std::vector<std::string> Registry::operations() const {
  std::vector<std::string> names;
  for (const auto& [name, e] : functions_)
    if (std::find(names.begin(), names.end(), e.spec.operation) == names.end()) names.push_back(e.spec.operation);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> Registry::backends() const {
  std::set<std::string> names{kReference};
  for (const auto& [operation, list] : backends_)
    for (const Backend& b : list) names.insert(b.name);
  return {names.begin(), names.end()};
}

namespace {

// Two neighbours in the wrong order count as one edit: the commonest slip of all.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::move(last);
    last = row;
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1] ? 1U : 0U)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> Registry::nearest(std::string_view name, std::size_t most) const {
  std::vector<std::pair<std::size_t, std::string>> scored;
  for (const auto& [known, e] : functions_)
    if (!e.spec.is_backward()) scored.emplace_back(edit_distance(name, known), known);
  std::sort(scored.begin(), scored.end());
  std::vector<std::string> best;
  for (std::size_t i = 0; i < std::min(most, scored.size()); ++i) best.push_back(scored[i].second);
  return best;
}

std::vector<std::string> Registry::defects() const {
  std::vector<std::string> list = refused_;
  for (const auto& [key, kernels] : kernels_) {
    const auto f = functions_.find(key.first);
    if (f == functions_.end()) {
      list.push_back("kernel of backend " + key.second + " for unknown function " + key.first);
      continue;
    }
    for (const ErasedKernel& k : kernels)
      if (!k.complete) list.push_back("kernel of backend " + key.second + " for " + key.first + " has no launcher");
    if (key.second == kReference) continue;
    const auto b = backends_.find(f->second.spec.operation);
    const std::string& backend = key.second;
    if (b == backends_.end() ||
        std::none_of(b->second.begin(), b->second.end(), [&backend](const Backend& x) { return x.name == backend; }))
      list.push_back("kernel for " + key.first + " names backend " + key.second + ", which operation " +
                     f->second.spec.operation + " does not have");
  }
  for (const auto& [name, e] : functions_)
    if (e.reference == nullptr) list.push_back(name + " has no reference");
  return list;
}

std::vector<EnvVariable> environment_variables(const Registry& r) {
  std::vector<EnvVariable> list = {
      {"FLA_CPP_DISABLE_DISPATCH", "unset", "\"1\" when the library is loaded: every call goes to the reference"}};
  for (const Registry::Entry* e : r.entries())
    for (const auto& c : e->candidates) {
      if (c.backend->env.empty()) continue;
      if (std::none_of(list.begin(), list.end(), [&](const EnvVariable& v) { return v.name == c.backend->env; }))
        list.push_back({c.backend->env, c.backend->default_enable ? "enabled" : "disabled",
                        "\"0\" disables backend " + c.backend->name + ", anything else enables it"});
    }
  return list;
}

}  // namespace fla
