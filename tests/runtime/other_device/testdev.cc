// A device plugin for the tests: Paddle sees a device "testdev", and operators run on the CPU between two copies.
//
// Every allocation is mapped at two addresses. Paddle gets the first, which is PROT_NONE; the copies of this file use the
// second. Code that takes a device pointer for a host pointer ends with SIGSEGV, as it would with real device memory.
// The interface is documented in paddle/phi/backends/device_ext.h of the installed wheel.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <type_traits>

#include "paddle/phi/backends/device_ext.h"
#include "paddle/phi/capi/all.h"

namespace {

struct Mapping {
  char* readable;
  size_t size;
};

class Memory {
 public:
  void* Allocate(size_t size) {
    void* readable = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (readable == MAP_FAILED) return nullptr;
    void* hidden = mremap(readable, 0, size, MREMAP_MAYMOVE);  // an old size of 0 adds a second mapping
    if (hidden == MAP_FAILED || mprotect(hidden, size, PROT_NONE) != 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    mappings_[static_cast<char*>(hidden)] = {static_cast<char*>(readable), size};
    return hidden;
  }

  bool Free(void* hidden) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = mappings_.find(static_cast<char*>(hidden));
    if (found == mappings_.end()) return false;
    munmap(found->second.readable, found->second.size);
    munmap(hidden, found->second.size);
    mappings_.erase(found);
    return true;
  }

  // The readable address of device memory; a host address is returned unchanged.
  char* Readable(const void* address) {
    char* pointer = static_cast<char*>(const_cast<void*>(address));
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = mappings_.upper_bound(pointer);
    if (next == mappings_.begin()) return pointer;
    const auto& [start, mapping] = *std::prev(next);
    return pointer < start + mapping.size ? mapping.readable + (pointer - start) : pointer;
  }

 private:
  std::map<char*, Mapping> mappings_;  // by the hidden address
  std::mutex mutex_;
};

Memory memory;
int current_device = 0;

template <typename... Arguments>
C_Status Nothing(Arguments...) {
  return C_SUCCESS;
}

C_Status Copy(const C_Device, void* target, const void* source, size_t size) {
  memmove(memory.Readable(target), memory.Readable(source), size);
  return C_SUCCESS;
}

C_Status CopyAsync(const C_Device device, C_Stream, void* target, const void* source, size_t size) {
  return Copy(device, target, source, size);
}

C_Status CopyPeer(const C_Device device, const C_Device, void* target, const void* source, size_t size) {
  return Copy(device, target, source, size);
}

C_Status CopyPeerAsync(const C_Device device, const C_Device, C_Stream, void* target, const void* source, size_t size) {
  return Copy(device, target, source, size);
}

C_Status Set(const C_Device, void* target, unsigned char value, size_t size) {
  memset(memory.Readable(target), value, size);
  return C_SUCCESS;
}

C_Status Allocate(const C_Device, void** address, size_t size) {
  *address = memory.Allocate(size);
  return *address != nullptr ? C_SUCCESS : C_FAILED;
}

C_Status Free(const C_Device, void* address, size_t) { return memory.Free(address) ? C_SUCCESS : C_ERROR; }

C_Status AllocateHost(const C_Device, void** address, size_t size) {
  *address = malloc(size);
  return *address != nullptr ? C_SUCCESS : C_FAILED;
}

C_Status FreeHost(const C_Device, void* address, size_t) {
  free(address);
  return C_SUCCESS;
}

C_Status SetDevice(const C_Device device) {
  current_device = device->id;
  return C_SUCCESS;
}

C_Status GetDevice(const C_Device device) {
  device->id = current_device;
  return C_SUCCESS;
}

C_Status DeviceCount(size_t* count) {
  *count = 1;
  return C_SUCCESS;
}

C_Status DeviceList(size_t* devices) {
  devices[0] = 0;
  return C_SUCCESS;
}

C_Status MemoryStatistics(const C_Device, size_t* total, size_t* free) {
  *total = *free = size_t{8} << 30;
  return C_SUCCESS;
}

C_Status SmallestChunk(const C_Device, size_t* size) {
  *size = 512;
  return C_SUCCESS;
}

C_Status Supported(const C_Device, bool* supported) {
  *supported = true;
  return C_SUCCESS;
}

// Paddle calls these two kernels itself (zeroed and accumulated gradients), without the copies around a CPU kernel.

template <typename T>
void Full(const phi::Context& context, const phi::IntArray& shape, const phi::Scalar& value, phi::DataType,
          phi::DenseTensor* out) {
  using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
  out->Resize(shape.GetData());
  T* target = reinterpret_cast<T*>(memory.Readable(context.template Alloc<T>(out)));
  const T number = static_cast<T>(value.to<Wide>());
  for (int64_t i = 0; i < out->numel(); ++i) target[i] = number;
}

// Offset in a tensor of the element that numpy's broadcasting rules put at position `index` of the result.
template <typename Shape>
int64_t BroadcastOffset(const Shape& shape, const Shape& result, int64_t index) {
  int64_t offset = 0, stride = 1;
  for (size_t back = 1; back <= shape.size(); ++back) {
    const int64_t length = shape[shape.size() - back], wide = result[result.size() - back];
    if (length > 1) offset += index % wide * stride;
    index /= wide;
    stride *= length;
  }
  return offset;
}

template <typename T>
void Add(const phi::Context& context, const phi::DenseTensor& x, const phi::DenseTensor& y, phi::DenseTensor* out) {
  const T* a = reinterpret_cast<T*>(memory.Readable(x.data<T>()));
  const T* b = reinterpret_cast<T*>(memory.Readable(y.data<T>()));
  T* sum = reinterpret_cast<T*>(memory.Readable(context.template Alloc<T>(out)));
  const auto x_shape = x.dims(), y_shape = y.dims(), shape = out->dims();
  for (int64_t i = 0; i < out->numel(); ++i) {
    sum[i] = a[BroadcastOffset(x_shape, shape, i)] + b[BroadcastOffset(y_shape, shape, i)];
  }
}

}  // namespace

PD_BUILD_PHI_KERNEL(add, testdev, ALL_LAYOUT, Add, float, double, int32_t, int64_t, phi::dtype::bfloat16) {}
PD_BUILD_PHI_KERNEL(full, testdev, ALL_LAYOUT, Full, float, double, uint8_t, int8_t, int16_t, int32_t, int64_t, bool,
                    phi::dtype::float16, phi::dtype::bfloat16) {}

extern "C" void InitPlugin(CustomRuntimeParams* parameters) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(parameters);
  static char name[] = "testdev", version[] = "1";
  parameters->device_type = name;
  parameters->sub_device_type = version;
  C_DeviceInterface& device = *parameters->interface;
  memset(&device, 0, sizeof device);
  device.initialize = Nothing;
  device.finalize = Nothing;
  device.init_device = Nothing;
  device.deinit_device = Nothing;
  device.set_device = SetDevice;
  device.get_device = GetDevice;
  device.create_stream = Nothing;
  device.destroy_stream = Nothing;
  device.query_stream = Nothing;
  device.synchronize_stream = Nothing;
  device.stream_wait_event = Nothing;
  device.stream_add_callback = Nothing;
  device.create_event = Nothing;
  device.destroy_event = Nothing;
  device.record_event = Nothing;
  device.query_event = Nothing;
  device.synchronize_event = Nothing;
  device.synchronize_device = Nothing;
  device.device_memory_allocate = Allocate;
  device.device_memory_deallocate = Free;
  device.device_memory_set = Set;
  device.host_memory_allocate = AllocateHost;
  device.host_memory_deallocate = FreeHost;
  device.memory_copy_h2d = Copy;
  device.memory_copy_d2h = Copy;
  device.memory_copy_d2d = Copy;
  device.memory_copy_p2p = CopyPeer;
  device.async_memory_copy_h2d = CopyAsync;
  device.async_memory_copy_d2h = CopyAsync;
  device.async_memory_copy_d2d = CopyAsync;
  device.async_memory_copy_p2p = CopyPeerAsync;
  device.get_device_count = DeviceCount;
  device.get_device_list = DeviceList;
  device.device_memory_stats = MemoryStatistics;
  device.device_min_chunk_size = SmallestChunk;
  device.is_float16_supported = Supported;
  device.is_bfloat16_supported = Supported;
}
