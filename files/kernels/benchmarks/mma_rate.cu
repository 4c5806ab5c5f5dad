// SPDX-License-Identifier: Apache-2.0
// What mma.sync m16n8k16 (fp16, fp32 sums) reaches, alone and with other instructions beside it: cycles a product and
// scheduler, by warps a scheduler. The indexer's NOTES.md quotes it.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 benchmarks/mma_rate.cu -o mma_rate && ./mma_rate
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

enum Beside { kNothing, kFma, kLop, kConversion };

__device__ __forceinline__ void multiply(float (&acc)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 16 products whose sums do not wait for one another, from kOperands pairs of operands; kEach instructions beside each.
template <Beside kBeside, int kEach, int kOperands>
__global__ void loop(const uint32_t* in, float* out, long long* cycles, int turns) {
  uint32_t a[kOperands][4], b[kOperands][2], words[16];
  float acc[16][4] = {}, floats[16];
  const uint32_t* own = in + threadIdx.x;
  for (int i = 0; i < kOperands; ++i) {
    for (int j = 0; j < 4; ++j) a[i][j] = own[(6 * i + j) * 512];
    for (int j = 0; j < 2; ++j) b[i][j] = own[(6 * i + 4 + j) * 512];
  }
  for (int i = 0; i < 16; ++i) words[i] = own[(100 + i) * 512], floats[i] = __uint_as_float(own[(120 + i) * 512]);
  const float factor = __uint_as_float(own[140 * 512]);
  __syncthreads();
  const long long start = clock64();
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      multiply(acc[i % 16], a[i / 4 % kOperands], b[i % kOperands]);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int at = (i * kEach + e) % 16;
        if (kBeside == kFma) asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(floats[at]) : "f"(__uint_as_float(words[at])), "f"(factor));
        if (kBeside == kLop) asm volatile("lop3.b32 %0, %0, %1, %1, 0x96;" : "+r"(words[at]) : "r"(words[(at + 1) % 16]));
        if (kBeside == kConversion)
          asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %0; cvt.rn.f16x2.e4m3x2 %0, l;}" : "+r"(words[at]));
      }
    }
  }
  const long long end = clock64();
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += acc[i][0] + acc[i][1] + acc[i][2] + acc[i][3] + floats[i] + words[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - start;
}

template <Beside kBeside, int kEach, int kOperands>
void line(const char* name, int sms, const uint32_t* in, float* out, long long* cycles) {
  const int turns = 200;
  std::printf("| %s |", name);
  for (const int warps : {4, 8, 12}) {
    for (int i = 0; i < 2; ++i) loop<kBeside, kEach, kOperands><<<sms, warps * 32>>>(in, out, cycles, turns);
    std::vector<long long> taken(sms);
    const cudaError_t error = cudaMemcpy(taken.data(), cycles, sms * sizeof(long long), cudaMemcpyDeviceToHost);
    if (error != cudaSuccess) std::exit((std::printf(" %s\n", cudaGetErrorString(error)), 1));
    std::printf(" %.2f |", *std::max_element(taken.begin(), taken.end()) / (32.0 * turns * warps / 4));
  }
  std::printf("\n");
}

int main() {
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) return std::printf("no GPU\n"), 1;
  const int sms = device.multiProcessorCount;
  std::vector<uint32_t> values(160 * 512);
  uint32_t state = 1;
  // pairs of fp16 between 0.25 and 0.5, either sign
  for (uint32_t& value : values) state = state * 1664525u + 1013904223u, value = (state & 0x83ff83ffu) | 0x34003400u;
  uint32_t* in;
  float* out;
  long long* cycles;
  cudaMalloc(&in, values.size() * 4), cudaMalloc(&out, sms * 512 * 4), cudaMalloc(&cycles, sms * 8);
  cudaMemcpy(in, values.data(), values.size() * 4, cudaMemcpyHostToDevice);
  std::printf("%s, %d SMs: cycles a product and scheduler\n\n| beside each product | 1 warp | 2 warps | 3 warps |\n|---|---|---|---|\n", device.name, sms);
  line<kNothing, 0, 1>("nothing, one pair of operands", sms, in, out, cycles);
  line<kNothing, 0, 4>("nothing, four pairs", sms, in, out, cycles);
  line<kFma, 1, 4>("one `fma` with three registers", sms, in, out, cycles);
  line<kFma, 2, 4>("two", sms, in, out, cycles);
  line<kLop, 1, 4>("one `lop3`", sms, in, out, cycles);
  line<kLop, 2, 4>("two", sms, in, out, cycles);
  line<kConversion, 1, 4>("one conversion of two e4m3", sms, in, out, cycles);
  line<kConversion, 2, 4>("two", sms, in, out, cycles);
}
