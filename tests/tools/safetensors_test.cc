#include "tools/common/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>

namespace fla::tools {
namespace {

namespace fs = std::filesystem;

// A folder of its own for each test, gone afterwards.
class SafeTensors : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "fla_safetensors_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    std::error_code ec;
    fs::remove_all(folder_, ec);
  }
  fs::path at(const char* name) const { return folder_ / name; }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

// Bytes at an address that is a multiple of 64, as a mapped file's are.
struct Bytes {
  explicit Bytes(std::string_view header, std::size_t data_bytes, std::uint64_t length) {
    size = 8 + header.size() + data_bytes;
    memory.resize(size / sizeof(Line) + 1);
    std::memcpy(data(), &length, 8);
    std::memcpy(data() + 8, header.data(), header.size());
    for (std::size_t i = 0; i < data_bytes; ++i) data()[8 + header.size() + i] = static_cast<std::byte>(i);
  }
  Bytes(std::string_view header, std::size_t data_bytes) : Bytes(header, data_bytes, header.size()) {}

  std::byte* data() { return reinterpret_cast<std::byte*>(memory.data()); }
  std::span<const std::byte> span() { return {data(), size}; }

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> memory;
  std::size_t size = 0;
};

void expect_refused(Bytes bytes, const std::string& text) {
  const auto r = SafeTensorsFile::parse(bytes.span(), "F");
  ASSERT_FALSE(r.ok()) << text;
  EXPECT_EQ(r.status().code(), Code::InvalidArgument);
  EXPECT_EQ(r.status().message().rfind("F: ", 0), 0U) << r.status().message();
  EXPECT_NE(r.status().message().find(text), std::string::npos) << r.status().message();
}

// The header of one tensor "x".
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

TEST(SafeTensorsParse, HeaderLength) {
  const std::byte few[7]{};
  const auto r = SafeTensorsFile::parse(few, "F");
  ASSERT_FALSE(r.ok());
  EXPECT_EQ(r.status().message(), "F: header length: expected 8 bytes, got a file of 7");
  EXPECT_FALSE(SafeTensorsFile::parse({}, "F").ok());
  expect_refused(Bytes("{}", 0, 3), "truncated: the first 8 bytes promise a header of 3 bytes, the file has 2 after");
  expect_refused(Bytes("{}", 0, UINT64_MAX),
                 "header length: expected at most 100000000, got 18446744073709551615: not a .safetensors file");
  expect_refused(Bytes("{}", 100'000'100, 100'000'001), "header length: expected at most 100000000, got 100000001");
  expect_refused(Bytes("", 0), "header: expected JSON");
}

TEST(SafeTensorsParse, HeaderShape) {
  expect_refused(Bytes("[]", 0), "header: expected an object, got array");
  expect_refused(Bytes("null", 0), "header: expected an object, got null");
  expect_refused(Bytes("{\"x\":", 0), "header: expected JSON, got an error at byte");
  expect_refused(Bytes("{} x", 0), "header: expected JSON");
  expect_refused(Bytes("{\"\xff\xfe\":1}", 0), "header: expected JSON");
  expect_refused(Bytes(std::string(100000, '['), 0), "header: expected JSON");
  expect_refused(Bytes(R"({"x":5})", 0), "tensor 'x': expected an object, got 5");
  expect_refused(Bytes(R"({"x":{"dtype":"F32","shape":[1]}})", 4), "tensor 'x': expected the key 'data_offsets'");
  expect_refused(Bytes(R"({"x":{"dtype":"F32","data_offsets":[0,4]}})", 4), "tensor 'x': expected the key 'shape'");
  expect_refused(Bytes(R"({"x":{"shape":[1],"data_offsets":[0,4]}})", 4), "tensor 'x': expected the key 'dtype'");
}

TEST(SafeTensorsParse, NamesTwice) {
  const std::string entry = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  expect_refused(Bytes("{\"x\":" + entry + ",\"x\":" + entry + "}", 4), "expected every name once, got 'x' twice");
  expect_refused(Bytes(R"({"x":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4), "'dtype' twice");
  expect_refused(Bytes(R"({"__metadata__":{"a":"1","a":"2"}})", 0), "'a' twice");
  // The same key in two objects is what every file has.
  Bytes good("{\"x\":" + entry + R"(,"y":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8);
  EXPECT_TRUE(SafeTensorsFile::parse(good.span(), "F").ok());
}

TEST(SafeTensorsParse, Types) {
  expect_refused(Bytes(one(R"("F31")", "[1]", "[0,4]"), 4), "tensor 'x': dtype: expected a type of the format");
  expect_refused(Bytes(one(R"("f32")", "[1]", "[0,4]"), 4), "got 'f32'");
  expect_refused(Bytes(one("7", "[1]", "[0,4]"), 4), "dtype: expected a type of the format (F32, BF16, ...), got 7");
  expect_refused(Bytes(one(R"("F4")", "[3]", "[0,2]"), 2), "expected whole bytes, got 12 bits");

  for (const char* type : {"U8", "BOOL", "I8", "F8_E4M3"}) {
    Bytes b(one("\"" + std::string(type) + "\"", "[3]", "[0,3]"), 3);
    const auto r = SafeTensorsFile::parse(b.span(), "F");
    ASSERT_TRUE(r.ok()) << r.status().message();
    EXPECT_TRUE((*r)->tensors().empty());
    EXPECT_EQ((*r)->unsupported().at("x"), type);
    EXPECT_EQ((*r)->tensor("x").status().message(),
              "F: tensor 'x': unsupported dtype: expected F32, F16, BF16, F64, I32 or I64, got " + std::string(type));
  }
  expect_refused(Bytes(one(R"("U8")", "[3]", "[0,4]"), 4), "data_offsets: expected 3 bytes");

  struct {
    const char* name;
    DType dtype;
  } const types[] = {{"F32", DType::F32}, {"F16", DType::F16}, {"BF16", DType::BF16},
                     {"F64", DType::F64}, {"I32", DType::I32}, {"I64", DType::I64}};
  for (const auto& t : types) {
    const std::string bytes = std::to_string(2 * size_of(t.dtype));
    Bytes b(one("\"" + std::string(t.name) + "\"", "[2]", "[0," + bytes + "]"), 2 * size_of(t.dtype));
    const auto r = SafeTensorsFile::parse(b.span(), "F");
    ASSERT_TRUE(r.ok()) << r.status().message();
    EXPECT_EQ((*r)->tensors().at("x").dtype, t.dtype);
  }
}

TEST(SafeTensorsParse, Shapes) {
  const std::string f32 = R"("F32")";
  expect_refused(Bytes(one(f32, "4", "[0,4]"), 4), "tensor 'x': shape: expected an array, got 4");
  expect_refused(Bytes(one(f32, "[-1]", "[0,4]"), 4), "tensor 'x': shape: expected integers >= 0, got -1");
  expect_refused(Bytes(one(f32, "[1.0]", "[0,4]"), 4), "shape: expected integers >= 0, got 1.0");
  expect_refused(Bytes(one(f32, "[\"1\"]", "[0,4]"), 4), "shape: expected integers >= 0, got '1'");
  expect_refused(Bytes(one(f32, "[1,1,1,1,1,1,1]", "[0,4]"), 4), "shape: expected at most 6 sizes, got 7");
  expect_refused(Bytes(one(f32, "[4294967296,4294967296]", "[0,0]"), 0), "fits 64 bits, got [4294967296,4294967296]");
  expect_refused(Bytes(one(f32, "[0,4294967296,4294967296]", "[0,0]"), 0), "fits 64 bits");
  expect_refused(Bytes(one(f32, "[18446744073709551615]", "[0,4]"), 4), "fits 64 bits");
  expect_refused(Bytes(one(f32, "[99999999999999999999]", "[0,4]"), 4), "shape: expected integers >= 0");
}

TEST(SafeTensorsParse, Offsets) {
  const std::string f32 = R"("F32")";
  expect_refused(Bytes(one(f32, "[1]", "[4,0]"), 8), "tensor 'x': data_offsets: expected begin <= end, got [4,0]");
  expect_refused(Bytes(one(f32, "[2]", "[0,8]"), 4), "truncated: the header promises 8 bytes of data, the file has 4");
  expect_refused(Bytes(one(f32, "[1]", "[8,12]"), 4),
                 "truncated: the header promises 12 bytes of data, the file has 4");
  expect_refused(Bytes(one(f32, "[1]", "[0,4]"), 7), "expected 4 bytes of data, as the header says, got 7: trailing");
  expect_refused(Bytes("{}", 1), "expected 0 bytes of data, as the header says, got 1: trailing");
  expect_refused(Bytes(one(f32, "[2]", "[0,4]"), 8), "data_offsets: expected 8 bytes (F32 and shape), got 4");
  expect_refused(Bytes(one(f32, "[1]", "[0,8]"), 8), "data_offsets: expected 4 bytes (F32 and shape), got 8");
  expect_refused(Bytes(one(f32, "[1]", "[-4,0]"), 4), "data_offsets: expected two integers >= 0");
  expect_refused(Bytes(one(f32, "[1]", "[0]"), 4), "data_offsets: expected two integers >= 0");
  expect_refused(Bytes(one(f32, "[1]", "4"), 4), "data_offsets: expected two integers >= 0, got 4");
  expect_refused(Bytes(one(f32, "[1]", "[18446744073709551611,18446744073709551615]"), 4),
                 "truncated: the header promises 18446744073709551615 bytes of data, the file has 4");

  const auto two = [](const char* a, const char* b) {
    return std::string(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)") + a +
           R"(},"b":{"dtype":"U8","shape":[8],"data_offsets":)" + b + "}}";
  };
  expect_refused(Bytes(two("[0,8]", "[4,12]"), 12),
                 "tensor 'b': data_offsets: expected a range of its own, got one that "
                 "overlaps tensor 'a'");
  expect_refused(Bytes(two("[0,8]", "[0,8]"), 8), "overlaps tensor");
  expect_refused(Bytes(two("[20,28]", "[0,8]"), 28), "tensor 'a': data_offsets: expected to begin at 8, got 20: a gap");
  expect_refused(Bytes(two("[4,12]", "[12,20]"), 20), "tensor 'a': data_offsets: expected to begin at 0, got 4: a gap");
  Bytes other_order(two("[8,16]", "[0,8]"), 16);
  EXPECT_TRUE(SafeTensorsFile::parse(other_order.span(), "F").ok());
  Bytes empty(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
              R"("b":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]}})",
              8);
  const auto r = SafeTensorsFile::parse(empty.span(), "F");
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ((*r)->tensors().at("b").numel(), 0);
}

TEST(SafeTensorsParse, Metadata) {
  expect_refused(Bytes(R"({"__metadata__":3})", 0), "__metadata__: expected an object, got 3");
  expect_refused(Bytes(R"({"__metadata__":{"a":1}})", 0), "__metadata__: 'a': expected a string, got 1");
  expect_refused(Bytes(R"({"__metadata__":{"a":null}})", 0), "__metadata__: 'a': expected a string, got null");
  Bytes b(R"({"__metadata__":{"op":"chunk_gla","notes":""}}   )", 0);
  const auto r = SafeTensorsFile::parse(b.span(), "F");
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ((*r)->metadata(), (std::map<std::string, std::string>{{"op", "chunk_gla"}, {"notes", ""}}));
  EXPECT_EQ((*r)->tensor("q").status().message(), "F: tensor 'q': expected in the file, got none of that name");
}

TEST(SafeTensorsParse, LongAndOddNamesInMessages) {
  const std::string name = "a\\n" + std::string(500, 'b');
  expect_refused(Bytes("{\"" + name + "\":1}", 0), "tensor 'a\\n" + std::string(78, 'b') + "...'");
  expect_refused(Bytes("{\"\\u001b[31m\\u009b2J\":1}", 0), "tensor '\\x1b[31m\\xc2\\x9b2J'");
  EXPECT_EQ(SafeTensorsFile::parse({}, "a\x1b]0;b\x07")  // a file's name is text from outside as well
                .status()
                .message()
                .substr(0, 14),
            "a\\x1b]0;b\\x07:");
}

TEST(SafeTensorsParse, MisalignedDataIsCopied) {
  std::string header = one(R"("F32")", "[2]", "[0,8]");
  header.resize((header.size() + 7) / 8 * 8 + 1, ' ');
  Bytes b(header, 8);
  const auto r = SafeTensorsFile::parse(b.span(), "F");
  ASSERT_TRUE(r.ok()) << r.status().message();
  const TensorView& t = (*r)->tensors().at("x");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data) % 4, 0U);
  EXPECT_EQ(std::memcmp(t.data, b.data() + 8 + header.size(), 8), 0);
}

TEST_F(SafeTensors, RoundTrip) {
  std::vector<float> q(2 * 3 * 4);
  std::iota(q.begin(), q.end(), 0.5F);
  std::int64_t cu[] = {0, 3, 7};
  bf16 h[5];
  for (int i = 0; i < 5; ++i) h[i] = to_bf16(static_cast<float>(i));
  std::int32_t scalar = -7;
  TensorView transposed(q.data(), {2, 3, 4});
  std::swap(transposed.shape[0], transposed.shape[2]);
  std::swap(transposed.stride[0], transposed.stride[2]);
  TensorView backwards(h, {5});
  backwards.data = h + 4;
  backwards.stride[0] = -1;
  TensorView spread(q.data(), {3});
  spread.stride[0] = 0;

  ASSERT_TRUE(
      write_safetensors(at("f.safetensors"),
                        {{"h", TensorView(h, {5})},  // two bytes an element, first: must not misalign the others
                         {"q", TensorView(q.data(), {2, 3, 4})},
                         {"transposed", transposed},
                         {"backwards", backwards},
                         {"spread", spread},
                         {"cu_seqlens", TensorView(cu, {3})},
                         {"scalar", TensorView(&scalar, {})},
                         {"empty", TensorView(static_cast<double*>(nullptr), {0, 7})}},
                        {{"op", "chunk_gla"}, {"notes", "\"quoted\" \xc3\xa4\n"}})
          .ok());
  EXPECT_EQ(files(), 1U);
  const auto r = SafeTensorsFile::open(at("f.safetensors"));
  ASSERT_TRUE(r.ok()) << r.status().message();
  const SafeTensorsFile& f = **r;
  EXPECT_EQ(f.metadata().at("notes"), "\"quoted\" \xc3\xa4\n");
  EXPECT_EQ(f.tensors().size(), 8U);
  EXPECT_EQ(std::memcmp(f.tensor("q")->data, q.data(), q.size() * 4), 0);
  EXPECT_EQ(std::memcmp(f.tensor("h")->data, h, sizeof(h)), 0);
  EXPECT_EQ(std::memcmp(f.tensor("cu_seqlens")->data, cu, sizeof(cu)), 0);
  EXPECT_EQ(*f.tensor("scalar")->as<std::int32_t>(), -7);
  EXPECT_EQ(f.tensor("scalar")->ndim, 0);
  EXPECT_EQ(f.tensor("empty")->dim(1), 7);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 3; ++j) {
      for (int k = 0; k < 2; ++k) {
        EXPECT_EQ(f.tensor("transposed")->as<float>()[(i * 3 + j) * 2 + k],
                  q[static_cast<std::size_t>((k * 3 + j) * 4 + i)]);
      }
    }
  }
  for (int i = 0; i < 5; ++i) EXPECT_EQ(f.tensor("backwards")->as<bf16>()[i].bits, h[4 - i].bits);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(f.tensor("spread")->as<float>()[i], q[0]);

  // The data begin at a multiple of 8, so nothing had to be copied.
  std::ifstream in(at("f.safetensors"), std::ios::binary);
  std::uint64_t length = 0;
  in.read(reinterpret_cast<char*>(&length), 8);
  EXPECT_EQ(length % 8, 0U);
}

TEST_F(SafeTensors, LargeTensorGoesPastTheBuffer) {
  std::vector<double> x(300'000);
  std::iota(x.begin(), x.end(), 0.0);
  TensorView columns(x.data(), {600, 500});
  std::swap(columns.shape[0], columns.shape[1]);
  std::swap(columns.stride[0], columns.stride[1]);
  ASSERT_TRUE(write_safetensors(at("f"), {{"x", TensorView(x.data(), {300'000})}, {"c", columns}}).ok());
  const auto r = SafeTensorsFile::open(at("f"));
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(std::memcmp((*r)->tensor("x")->data, x.data(), x.size() * 8), 0);
  EXPECT_EQ((*r)->tensor("c")->as<double>()[601], 500.0 + 1.0);
}

TEST_F(SafeTensors, NoTensors) {
  ASSERT_TRUE(write_safetensors(at("f"), {}).ok());
  const auto r = SafeTensorsFile::open(at("f"));
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_TRUE((*r)->tensors().empty());
}

TEST_F(SafeTensors, OpenRefuses) {
  const auto refused = [](const fs::path& p, const std::string& text) {
    const auto r = SafeTensorsFile::open(p);
    ASSERT_FALSE(r.ok());
    EXPECT_EQ(r.status().code(), Code::InvalidArgument);
    EXPECT_EQ(r.status().message(), p.string() + ": " + text);
  };
  refused(at("none"), "cannot open: No such file or directory");
  refused(folder_, "expected a regular file, got something else");
  ASSERT_EQ(::mkfifo(at("fifo").c_str(), 0600), 0);
  refused(at("fifo"), "expected a regular file, got something else");
  std::ofstream(at("empty")).close();
  refused(at("empty"), "header length: expected 8 bytes, got a file of 0");
}

TEST_F(SafeTensors, WriteRefusesTensors) {
  float x[4]{};
  const TensorView v(x, {4});
  TensorView cuda = v, null = v;
  cuda.device = {DeviceType::Cuda, 0};
  null.data = nullptr;
  const auto refused = [&](const std::vector<std::pair<std::string, TensorView>>& t, const std::string& text) {
    const Status s = write_safetensors(at("f"), t);
    ASSERT_FALSE(s.ok());
    EXPECT_EQ(s.code(), Code::InvalidArgument);
    EXPECT_EQ(s.message(), at("f").string() + ": " + text);
    EXPECT_EQ(files(), 0U);
  };
  refused({{"x", v}, {"x", v}}, "tensor 'x': expected every name once, got it twice");
  refused({{"__metadata__", v}}, "tensor '__metadata__': expected another name, got the format's own");
  refused({{"x", TensorView()}}, "tensor 'x': expected a tensor, got an absent one");
  refused({{"x", cuda}}, "tensor 'x': expected host memory, got a CUDA tensor");
  refused({{"x", null}}, "tensor 'x': expected memory, got a null pointer");
  refused({{"\xff", v}}, "names and metadata: expected UTF-8, got other bytes");
}

TEST_F(SafeTensors, UnwritablePlaces) {
  float x[4]{};
  const std::vector<std::pair<std::string, TensorView>> t{{"x", TensorView(x, {4})}};
  const Status s = write_safetensors(at("no/such/f"), t);
  EXPECT_EQ(s.code(), Code::InvalidArgument);
  EXPECT_EQ(s.message(), at("no/such/f").string() + ": cannot write: No such file or directory");
  EXPECT_EQ(write_safetensors(folder_, t).code(), Code::InvalidArgument);
  // A device is never replaced by a file, whoever runs this.
  EXPECT_EQ(write_safetensors("/dev/null", t).message(),
            "/dev/null: expected a regular file to replace, got something else");
  EXPECT_EQ(files(), 0U);
}

TEST_F(SafeTensors, FailedWriteLeavesTheOldFile) {
  std::vector<float> x(100'000);
  ASSERT_TRUE(write_safetensors(at("f"), {{"old", TensorView(x.data(), {4})}}).ok());

  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 100'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status s = write_safetensors(at("f"), {{"new", TensorView(x.data(), {100'000})}});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);

  EXPECT_EQ(s.message(), at("f").string() + ": cannot write: File too large");
  EXPECT_EQ(files(), 1U);
  EXPECT_TRUE((*SafeTensorsFile::open(at("f")))->tensors().contains("old"));
}

TEST_F(SafeTensors, LinkStaysALink) {
  float x[4]{};
  ASSERT_TRUE(write_safetensors(at("f"), {}).ok());
  fs::create_symlink(at("f"), at("link"));
  ASSERT_TRUE(write_safetensors(at("link"), {{"x", TensorView(x, {4})}}).ok());
  EXPECT_TRUE(fs::is_symlink(at("link")));
  EXPECT_TRUE((*SafeTensorsFile::open(at("f")))->tensors().contains("x"));

  // A chain of relative links to a file that is not there yet.
  fs::create_directory(at("d"));
  fs::create_symlink("d/second", at("first"));
  fs::create_symlink("third", at("d/second"));
  ASSERT_TRUE(write_safetensors(at("first"), {{"x", TensorView(x, {4})}}).ok());
  EXPECT_TRUE(fs::is_symlink(at("first")) && fs::is_symlink(at("d/second")));
  EXPECT_TRUE((*SafeTensorsFile::open(at("d/third")))->tensors().contains("x"));

  fs::create_symlink("b", at("a"));
  fs::create_symlink("a", at("b"));
  const Status s = write_safetensors(at("a"), {{"x", TensorView(x, {4})}});
  EXPECT_EQ(s.message(), at("a").string() + ": expected a file, got a circle of links");
  EXPECT_TRUE(fs::is_symlink(at("a")));
}

TEST_F(SafeTensors, ViewsOutliveTheReplacedFile) {
  float x[2] = {1, 2};
  ASSERT_TRUE(write_safetensors(at("f"), {{"x", TensorView(x, {2})}}).ok());
  const auto r = SafeTensorsFile::open(at("f"));
  ASSERT_TRUE(r.ok());
  x[0] = 9;
  ASSERT_TRUE(write_safetensors(at("f"), {{"x", TensorView(x, {2})}}).ok());
  EXPECT_EQ((*r)->tensor("x")->as<float>()[0], 1.0F);
}

TEST(SafeTensorsGolden, EveryRecordedFileOpens) {
  const char* folder = std::getenv("FLA_CPP_GOLDEN");
  if (folder == nullptr) GTEST_SKIP() << "FLA_CPP_GOLDEN is not set";
  int files = 0;
  for (const auto& e : fs::recursive_directory_iterator(folder)) {
    if (e.path().extension() != ".safetensors") continue;
    const auto r = SafeTensorsFile::open(e.path());
    ASSERT_TRUE(r.ok()) << r.status().message();
    EXPECT_TRUE((*r)->metadata().contains("op")) << e.path();
    EXPECT_FALSE((*r)->tensors().empty()) << e.path();
    EXPECT_TRUE((*r)->unsupported().empty()) << e.path();
    ++files;
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace fla::tools
