#include "tools/common/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>

#include "fla/core/text.h"
#include "tools/common/json_strict.h"

namespace fla::tools {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "data goes from file to tensor without a swap of bytes");

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kLengthBytes = 8;
constexpr const char* kMetadata = "__metadata__";

struct TypeName {
  const char* name;
  std::uint64_t bits;
  std::optional<DType> dtype;  // none: of the format, but not of this library
};
constexpr TypeName kTypes[] = {
    {"F32", 32, DType::F32}, {"F16", 16, DType::F16}, {"BF16", 16, DType::BF16}, {"F64", 64, DType::F64},
    {"I32", 32, DType::I32}, {"I64", 64, DType::I64}, {"BOOL", 8, {}},           {"U8", 8, {}},
    {"I8", 8, {}},           {"U16", 16, {}},         {"I16", 16, {}},           {"U32", 32, {}},
    {"U64", 64, {}},         {"C64", 64, {}},         {"F8_E4M3", 8, {}},        {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},      {"F6_E2M3", 6, {}},      {"F6_E3M2", 6, {}},        {"F4", 4, {}},
};

const TypeName* find_type(std::string_view name) {
  for (const TypeName& t : kTypes) {
    if (name == t.name) return &t;
  }
  return nullptr;
}

// What stands in a message for a JSON value: the number or text itself where that is short, else its kind.
std::string describe(const Json& j) {
  if (j.is_string()) return "'" + excerpt(j.get_ref<const std::string&>()) + "'";
  if (j.is_number() || j.is_boolean()) return j.dump();
  return j.type_name();
}

std::string system_error_text(int error) { return std::generic_category().message(error); }

struct FileDescriptor {
  int fd;
  explicit FileDescriptor(int f) : fd(f) {}
  ~FileDescriptor() {
    if (fd >= 0) ::close(fd);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
};

}  // namespace

SafeTensorsFile::~SafeTensorsFile() {
  if (!mapping_.empty()) ::munmap(mapping_.data(), mapping_.size());
}

Status SafeTensorsFile::error(const std::string& what) const {
  return {Code::InvalidArgument, printable(name_) + ": " + what};
}

Status SafeTensorsFile::error(std::string_view tensor_name, const std::string& what) const {
  return error("tensor '" + excerpt(tensor_name) + "': " + what);
}

Result<TensorView> SafeTensorsFile::tensor(std::string_view tensor_name) const {
  if (const auto it = tensors_.find(tensor_name); it != tensors_.end()) return it->second;
  if (const auto it = unsupported_.find(tensor_name); it != unsupported_.end()) {
    return error(tensor_name, "unsupported dtype: expected F32, F16, BF16, F64, I32 or I64, got " + it->second);
  }
  return error(tensor_name, "expected in the file, got none of that name");
}

Result<std::shared_ptr<SafeTensorsFile>> SafeTensorsFile::open(const std::filesystem::path& path) {
  std::shared_ptr<SafeTensorsFile> file(new SafeTensorsFile);
  file->name_ = path.string();
  // O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer, and is refused below.
  const FileDescriptor f(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (f.fd < 0) return file->error("cannot open: " + system_error_text(errno));
  struct stat st {};
  if (::fstat(f.fd, &st) != 0) return file->error("cannot read: " + system_error_text(errno));
  if (!S_ISREG(st.st_mode)) return file->error("expected a regular file, got something else");
  const auto size = static_cast<std::size_t>(st.st_size);
  if (size > 0) {
    void* p = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, f.fd, 0);
    if (p == MAP_FAILED) return file->error("cannot map: " + system_error_text(errno));
    file->mapping_ = {static_cast<std::byte*>(p), size};
  }
  if (Status s = file->load(file->mapping_); !s.ok()) return s;
  return file;
}

Result<std::shared_ptr<SafeTensorsFile>> SafeTensorsFile::parse(std::span<const std::byte> bytes,
                                                                const std::string& name) {
  std::shared_ptr<SafeTensorsFile> file(new SafeTensorsFile);
  file->name_ = name;
  if (Status s = file->load(bytes); !s.ok()) return s;
  return file;
}

Status SafeTensorsFile::load(std::span<const std::byte> bytes) {
  if (bytes.size() < kLengthBytes) {
    return error("header length: expected 8 bytes, got a file of " + std::to_string(bytes.size()));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kMaxHeader) {
    return error("header length: expected at most " + std::to_string(kMaxHeader) + ", got " + std::to_string(length) +
                 ": not a .safetensors file");
  }
  if (const std::size_t rest = bytes.size() - kLengthBytes; length > rest) {
    return error("truncated: the first 8 bytes promise a header of " + std::to_string(length) +
                 " bytes, the file has " + std::to_string(rest) + " after them");
  }
  const auto header_bytes = static_cast<std::size_t>(length);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, header_bytes);
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + header_bytes);

  const Result<Json> parsed = parse_json_strict<Json>(text);
  if (!parsed.ok()) return error("header: " + parsed.status().message());
  const Json& header = parsed.value();
  if (!header.is_object()) return error("header: expected an object, got " + describe(header));

  struct Range {
    std::uint64_t begin, end;
    std::string name;
    const TypeName* type;
    std::array<std::int64_t, kMaxDims> dims;
    std::size_t rank;
  };
  std::vector<Range> ranges;
  for (const auto& [tensor_name, entry] : header.items()) {
    if (tensor_name == kMetadata) {
      if (!entry.is_object()) return error("__metadata__: expected an object, got " + describe(entry));
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) {
          return error("__metadata__: '" + excerpt(key) + "': expected a string, got " + describe(value));
        }
        metadata_.emplace(key, value.get<std::string>());
      }
      continue;
    }

    if (!entry.is_object()) return error(tensor_name, "expected an object, got " + describe(entry));
    for (const char* key : {"dtype", "shape", "data_offsets"}) {
      if (!entry.contains(key)) return error(tensor_name, std::string("expected the key '") + key + "', got none");
    }
    const Json& dtype = entry["dtype"];
    const TypeName* type = dtype.is_string() ? find_type(dtype.get_ref<const std::string&>()) : nullptr;
    if (type == nullptr) {
      return error(tensor_name, "dtype: expected a type of the format (F32, BF16, ...), got " + describe(dtype));
    }

    const Json& shape = entry["shape"];
    if (!shape.is_array()) return error(tensor_name, "shape: expected an array, got " + describe(shape));
    if (shape.size() > static_cast<std::size_t>(kMaxDims)) {
      return error(tensor_name, "shape: expected at most " + std::to_string(kMaxDims) + " sizes, got " +
                                    std::to_string(shape.size()));
    }
    std::array<std::int64_t, kMaxDims> dims{};
    std::uint64_t bits = type->bits;
    std::uint64_t stride_bits = type->bits;  // zero sizes count as 1, as in TensorView's strides
    bool fits = true;
    for (std::size_t i = 0; i < shape.size(); ++i) {
      const Json& n = shape[i];
      if (!n.is_number_unsigned()) {
        return error(tensor_name, "shape: expected integers >= 0, got " + describe(n));
      }
      const auto size = n.get<std::uint64_t>();
      fits = fits && size <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) &&
             !__builtin_mul_overflow(bits, size, &bits) &&
             !__builtin_mul_overflow(stride_bits, std::max<std::uint64_t>(size, 1), &stride_bits);
      dims[i] = static_cast<std::int64_t>(size);
    }
    if (!fits) return error(tensor_name, "shape: expected a size that fits 64 bits, got " + shape.dump());
    const std::uint64_t size_bytes = bits / 8;
    if (bits % 8 != 0) return error(tensor_name, "shape: expected whole bytes, got " + std::to_string(bits) + " bits");

    const Json& offsets = entry["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
      return error(tensor_name, "data_offsets: expected two integers >= 0, got " + describe(offsets));
    }
    const auto begin = offsets[0].get<std::uint64_t>();
    const auto end = offsets[1].get<std::uint64_t>();
    const std::string got = "[" + std::to_string(begin) + "," + std::to_string(end) + "]";
    if (begin > end) return error(tensor_name, "data_offsets: expected begin <= end, got " + got);
    if (end - begin != size_bytes) {
      return error(tensor_name, "data_offsets: expected " + std::to_string(size_bytes) + " bytes (" + type->name +
                                    " and shape), got " + std::to_string(end - begin));
    }
    ranges.push_back({begin, end, tensor_name, type, dims, shape.size()});
  }

  // The tensors fill the data, one after the other: bytes that belong to none could be anything.
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  std::uint64_t promised = 0;
  for (const Range& r : ranges) promised = std::max(promised, r.end);
  if (promised > data.size()) {
    return error("truncated: the header promises " + std::to_string(promised) + " bytes of data, the file has " +
                 std::to_string(data.size()));
  }
  const Range* last = nullptr;
  for (const Range& r : ranges) {
    if (r.begin == r.end) continue;
    const std::uint64_t free = last == nullptr ? 0 : last->end;
    if (r.begin < free) {
      return error(r.name, "data_offsets: expected a range of its own, got one that overlaps tensor '" +
                               excerpt(last->name) + "'");
    }
    if (r.begin > free) {
      return error(r.name, "data_offsets: expected to begin at " + std::to_string(free) + ", got " +
                               std::to_string(r.begin) + ": a gap that belongs to no tensor");
    }
    last = &r;
  }
  if (promised < data.size()) {
    return error("expected " + std::to_string(promised) + " bytes of data, as the header says, got " +
                 std::to_string(data.size()) + ": trailing bytes");
  }

  for (const Range& r : ranges) {
    if (!r.type->dtype) {
      unsupported_.emplace(r.name, r.type->name);
      continue;
    }
    const auto size = static_cast<std::size_t>(r.end - r.begin);
    void* p = const_cast<std::byte*>(data.data() + r.begin);
    if (reinterpret_cast<std::uintptr_t>(p) % size_of(*r.type->dtype) != 0) {
      std::unique_ptr<std::byte[]> copy(new (std::nothrow) std::byte[size]);
      if (copy == nullptr) {
        return {Code::OutOfMemory, printable(name_) + ": tensor '" + excerpt(r.name) + "': no memory for " +
                                       std::to_string(size) + " bytes"};
      }
      if (size > 0) std::memcpy(copy.get(), p, size);
      copies_.push_back(std::move(copy));
      p = copies_.back().get();
    }
    tensors_.emplace(r.name, TensorView(p, *r.type->dtype, std::span(r.dims.data(), r.rank)));
  }
  return {};
}

namespace {

class Writer {
 public:
  explicit Writer(int fd) : fd_(fd) { buffer_.reserve(kBuffer); }

  void add(const void* p, std::size_t n) {
    if (buffer_.size() + n > kBuffer) flush();
    const auto* b = static_cast<const std::byte*>(p);
    if (n >= kBuffer) {
      put(b, n);
    } else {
      buffer_.insert(buffer_.end(), b, b + n);
    }
  }

  void add(const TensorView& t) {
    const std::size_t size = size_of(t.dtype);
    if (t.numel() == 0) return;
    if (t.contiguous()) return add(t.data, static_cast<std::size_t>(t.numel()) * size);
    std::array<std::int64_t, kMaxDims> index{};
    for (std::int64_t left = t.numel(); left > 0; --left) {
      std::int64_t offset = 0;
      for (std::size_t i = 0; i < t.dims().size(); ++i) offset += index[i] * t.stride[i];
      add(static_cast<const std::byte*>(t.data) + offset * static_cast<std::int64_t>(size), size);
      for (std::size_t i = t.dims().size(); i-- > 0;) {
        if (++index[i] < t.shape[i]) break;
        index[i] = 0;
      }
    }
  }

  // errno's value of the first write that failed, or 0.
  int finish() {
    flush();
    return error_;
  }

 private:
  static constexpr std::size_t kBuffer = std::size_t{1} << 18;

  void flush() {
    put(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

  void put(const std::byte* p, std::size_t n) {
    while (n > 0 && error_ == 0) {
      const ssize_t done = ::write(fd_, p, n);
      if (done < 0) {
        if (errno != EINTR) error_ = errno;
        continue;
      }
      p += done;
      n -= static_cast<std::size_t>(done);
    }
  }

  int fd_;
  int error_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace

Result<std::filesystem::path> write_target(const std::filesystem::path& path) {
  constexpr int kMostLinks = 40;  // as many as the system follows
  std::filesystem::path target = path;
  std::error_code ec;
  for (int i = 0; std::filesystem::is_symlink(std::filesystem::symlink_status(target, ec)); ++i) {
    if (i == kMostLinks)
      return Status(Code::InvalidArgument, printable(path.string()) + ": expected a file, got a circle of links");
    const std::filesystem::path next = std::filesystem::read_symlink(target, ec);
    if (ec) return Status(Code::InvalidArgument, printable(path.string()) + ": cannot read the link: " + ec.message());
    target = next.is_absolute() ? next : target.parent_path() / next;
  }
  return target;
}

Status write_safetensors(const std::filesystem::path& path,
                         const std::vector<std::pair<std::string, TensorView>>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  const std::string name = printable(path.string());
  const auto bad = [&name](const std::string& what) { return Status(Code::InvalidArgument, name + ": " + what); };

  std::set<std::string_view> names;
  for (const auto& [tensor_name, t] : tensors) {
    const std::string who = "tensor '" + excerpt(tensor_name) + "': ";
    if (tensor_name == kMetadata) return bad(who + "expected another name, got the format's own");
    if (!names.insert(tensor_name).second) return bad(who + "expected every name once, got it twice");
    if (!t.present()) return bad(who + "expected a tensor, got an absent one");
    if (t.device.type != DeviceType::Cpu) return bad(who + "expected host memory, got a CUDA tensor");
    if (t.data == nullptr && t.numel() > 0) return bad(who + "expected memory, got a null pointer");
  }

  // The widest types first, so that every tensor is aligned in the file whatever sizes the ones before it have.
  std::vector<const std::pair<std::string, TensorView>*> order;
  order.reserve(tensors.size());
  for (const auto& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return size_of(a->second.dtype) > size_of(b->second.dtype); });

  std::string header;
  try {
    Json j = Json::object();
    if (!metadata.empty()) j[kMetadata] = metadata;
    std::uint64_t begin = 0;
    for (const auto* t : order) {
      const TensorView& v = t->second;
      const std::uint64_t end = begin + static_cast<std::uint64_t>(v.numel()) * size_of(v.dtype);
      j[t->first] = {{"dtype", name_of(v.dtype)},
                     {"shape", std::vector<std::int64_t>(v.dims().begin(), v.dims().end())},
                     {"data_offsets", {begin, end}}};
      begin = end;
    }
    header = j.dump();
  } catch (const Json::exception&) {
    return bad("names and metadata: expected UTF-8, got other bytes");
  }
  header.resize((header.size() + 7) / 8 * 8, ' ');
  if (header.size() > kMaxHeader) {
    return bad("header: expected at most " + std::to_string(kMaxHeader) + " bytes, got " +
               std::to_string(header.size()));
  }

  const Result<std::filesystem::path> resolved = write_target(path);
  if (!resolved) return resolved.status();
  const std::filesystem::path& target = *resolved;
  std::error_code ec;
  // A device (/dev/null) must not be replaced by a file.
  if (std::filesystem::exists(target, ec) && !std::filesystem::is_regular_file(target, ec)) {
    return bad("expected a regular file to replace, got something else");
  }
  static std::atomic<unsigned> serial{0};
  std::filesystem::path temporary = target;
  temporary += ".tmp." + std::to_string(::getpid()) + "." + std::to_string(serial.fetch_add(1));
  int error = 0;
  {
    const FileDescriptor f(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (f.fd < 0) return bad("cannot write: " + system_error_text(errno));
    Writer w(f.fd);
    const std::uint64_t length = header.size();
    w.add(&length, kLengthBytes);
    w.add(header.data(), header.size());
    for (const auto* t : order) w.add(t->second);
    error = w.finish();
  }
  if (error == 0 && ::rename(temporary.c_str(), target.c_str()) != 0) error = errno;
  if (error == 0) return {};
  ::unlink(temporary.c_str());
  return bad("cannot write: " + system_error_text(error));
}

}  // namespace fla::tools
