#include "fla/core/dlpack.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>

namespace fla {
namespace {

struct Source {
  alignas(64) std::array<std::byte, 4096> memory{};
  std::array<std::int64_t, 8> shape{2, 3, 4, 1, 1, 1, 1, 1};
  std::array<std::int64_t, 8> strides{12, 4, 1, 1, 1, 1, 1, 1};
  DLTensor t{};

  Source() {
    t.data = memory.data();
    t.device.device_type = kDLCPU;
    t.ndim = 3;
    t.dtype = {kDLFloat, 32, 1};
    t.shape = shape.data();
  }
};

void expect_refused(const DLTensor& t, const std::string& text) {
  const Result<TensorView> r = from_dlpack(t);
  ASSERT_FALSE(r.ok()) << text;
  EXPECT_EQ(r.status().code(), Code::InvalidArgument);
  EXPECT_NE(r.status().message().find(text), std::string::npos) << r.status().message();
}

TEST(DlPack, NullStridesAreContiguous) {
  Source s;
  const Result<TensorView> r = from_dlpack(s.t);
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(r->data, s.memory.data());
  EXPECT_EQ(r->dtype, DType::F32);
  EXPECT_EQ(r->device, Device{});
  ASSERT_EQ(r->ndim, 3);
  EXPECT_TRUE(r->contiguous());
  EXPECT_EQ(r->numel(), 24);
  EXPECT_EQ(r->stride[0], 12);
}

TEST(DlPack, StridesAndByteOffset) {
  Source s;
  s.strides = {1, 2, -6};
  s.t.strides = s.strides.data();
  s.t.byte_offset = 72;
  const Result<TensorView> r = from_dlpack(s.t);
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(r->data, s.memory.data() + 72);
  EXPECT_EQ(r->stride[2], -6);
  EXPECT_FALSE(r->contiguous());
}

TEST(DlPack, EveryTypeGoesThereAndBack) {
  struct {
    std::uint8_t code, bits;
    DType dtype;
  } const types[] = {{kDLFloat, 16, DType::F16},   {kDLFloat, 32, DType::F32}, {kDLFloat, 64, DType::F64},
                     {kDLBfloat, 16, DType::BF16}, {kDLInt, 32, DType::I32},   {kDLInt, 64, DType::I64}};
  for (const auto& x : types) {
    Source s;
    s.t.dtype = {x.code, x.bits, 1};
    Result<TensorView> r = from_dlpack(s.t);
    ASSERT_TRUE(r.ok()) << r.status().message();
    EXPECT_EQ(r->dtype, x.dtype);
    const DLTensor back = to_dlpack(*r);
    EXPECT_EQ(back.dtype.code, x.code);
    EXPECT_EQ(back.dtype.bits, x.bits);
    EXPECT_EQ(back.dtype.lanes, 1);
    EXPECT_EQ(back.data, s.t.data);
    EXPECT_EQ(back.byte_offset, 0U);
    ASSERT_EQ(back.ndim, 3);
    EXPECT_EQ(back.shape, r->shape.data());
    EXPECT_EQ(back.strides[0], 12);
  }
}

TEST(DlPack, Devices) {
  Source s;
  s.t.device = {kDLCUDA, 3};
  EXPECT_EQ(from_dlpack(s.t)->device, (Device{DeviceType::Cuda, 3}));
  s.t.device = {kDLCUDAManaged, 1};
  EXPECT_EQ(from_dlpack(s.t)->device, (Device{DeviceType::Cuda, 1}));
  s.t.device = {kDLCUDAHost, 0};
  EXPECT_EQ(from_dlpack(s.t)->device, Device{});
  s.t.device = {kDLMetal, 0};
  expect_refused(s.t, "got 8");

  TensorView v(static_cast<float*>(nullptr), {0}, {DeviceType::Cuda, 2});
  EXPECT_EQ(to_dlpack(v).device.device_type, kDLCUDA);
  EXPECT_EQ(to_dlpack(v).device.device_id, 2);
}

TEST(DlPack, RefusesTypes) {
  for (const DLDataType d : {DLDataType{kDLFloat, 8, 1}, DLDataType{kDLInt, 8, 1}, DLDataType{kDLUInt, 32, 1},
                             DLDataType{kDLFloat, 32, 4}, DLDataType{kDLBfloat, 32, 1}, DLDataType{99, 32, 1}}) {
    Source s;
    s.t.dtype = d;
    expect_refused(s.t, "got code " + std::to_string(d.code) + ", bits " + std::to_string(d.bits) + ", lanes " +
                            std::to_string(d.lanes));
  }
}

TEST(DlPack, RefusesShapes) {
  Source s;
  s.t.ndim = 7;
  expect_refused(s.t, "rank: expected 0 to 6, got 7");
  s.t.ndim = -1;
  expect_refused(s.t, "got -1");
  s.t.ndim = 3;
  s.shape[1] = -3;
  expect_refused(s.t, "shape[1]: expected at least 0, got -3");
  s.shape = {std::int64_t{1} << 31, std::int64_t{1} << 31, 1};
  expect_refused(s.t, "fits 64 bits");
  s.shape = {0, std::int64_t{1} << 40, std::int64_t{1} << 40};
  expect_refused(s.t, "fits 64 bits");
  s.t.shape = nullptr;
  expect_refused(s.t, "got null");
}

TEST(DlPack, ScalarEmptyAndNull) {
  Source s;
  s.t.ndim = 0;
  s.t.shape = nullptr;
  EXPECT_EQ(from_dlpack(s.t)->numel(), 1);
  s.t.data = nullptr;
  expect_refused(s.t, "data: expected memory of 1 elements, got null");
  s.t.ndim = 2;
  s.shape = {0, 5};
  s.t.shape = s.shape.data();
  s.t.byte_offset = 4;
  const Result<TensorView> r = from_dlpack(s.t);
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->data, nullptr);
  EXPECT_TRUE(r->present());
}

TEST(DlPack, RefusesMisalignedData) {
  Source s;
  s.t.byte_offset = 6;
  expect_refused(s.t, "multiple of 4 for F32, got one 2 past (byte_offset 6)");
  s.t.dtype = {kDLFloat, 16, 1};
  EXPECT_TRUE(from_dlpack(s.t).ok());
}

}  // namespace
}  // namespace fla
