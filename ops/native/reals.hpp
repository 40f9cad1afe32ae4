// What vectors hold, float or double, and the constants of the functions over them. Compiled once per
// instruction set, as vector.hpp is.
#pragma once

#include <cstdint>

namespace fuseport::FUSEPORT_ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

// exp(r) = 1 + r + r²·EXP(r) for |r| ≤ ln(2)/2; LN2_HIGH has so few bits that k·LN2_HIGH is exact.
// 2^r = 1 + r·EXP2(r) for |r| ≤ 1/2, and log(1 + e) = e·LOG1P(e) for 0 ≤ e ≤ 1. sin(πf) = f·SIN(f²)
// and cos(πf) = 1 + f²·COS(f²) for |f| ≤ 1/2. These are polynomials through the Chebyshev nodes of
// their range (mpmath's chebyfit, 50 digits), lowest power first, and good to a tenth of an ulp of the
// result, or of 1 for the last two. ROUND + k holds the integer k in its low bits; from WHOLE on all
// numbers are integers.
//
// A vector of 16 or 8 floats holds ROOTS, 2^(i/16) or 2^(i/8) times a number near 1, too. Of a number in
// such parts the low bits choose among them, as they are in PARTS + k; what is left, |r| ≤ 1/32 or 1/16,
// needs shorter polynomials. That number is the first root, and one of those for which the others round
// best: of 16 to 0.27 of an ulp, and the two next to it to 0.07; of 8 to 0.05. A recurrence that decays
// slowly multiplies by one of these again and again, and errors of one sign add up. The polynomials
// divide by it: with it, 1 + EXP2_NEAR(r) is 2^r, and 1 + EXP_NEAR(r) is exp(r) for |r| ≤ ln(2)/32 or
// ln(2)/16. Those for 8 roots have their errors where they do not add up: 0.03 of an ulp near r = 0, and
// 0.3 at the ends (minimax, with a weight of 1/10 + 9/10·|r|/|r|max).
struct F32 {
  using Real = float;
  typedef float Vector __attribute__((vector_size(WIDTH)));
  typedef double Wide __attribute__((vector_size(2 * WIDTH)));  // as many numbers
  typedef int32_t Integers __attribute__((vector_size(WIDTH)));
  typedef uint32_t Bits __attribute__((vector_size(WIDTH)));
  static constexpr int LANES = WIDTH / 4, MANTISSA = 23, BIAS = 127;
  static constexpr float LOWEST = -104.0f, HIGHEST = 89.0f;  // exp is 0 below, Inf above
  static constexpr float FAR = 0x1p64f, NEAR = 125;          // powers: see exp2_of_product
  static constexpr float ROUND = 0x1.8p23f, LOG2E = 0x1.715476p0f;
  static constexpr float LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
  static constexpr float EXP[] = {0.5f, 0x1.5554dep-3f, 0x1.55551ap-5f, 0x1.120b62p-7f,
                                  0x1.6d10fcp-10f};
  static constexpr float EXP2[] = {0x1.62e43p-1f,  0x1.ebfbep-3f,  0x1.c6af6cp-5f,
                                   0x1.3b2a54p-7f, 0x1.5f089p-10f, 0x1.44138ap-13f};
  static constexpr float LOG1P[] = {
      0x1p+0f, -0x1.ffffb8p-2f, 0x1.554bd6p-2f, -0x1.ff0254p-3f, 0x1.92b43p-3f, -0x1.38b908p-3f,
      0x1.afdde8p-4f, -0x1.cdd008p-5f, 0x1.402f4cp-6f, -0x1.a04acap-9f};
#if defined(__AVX512F__)
  static constexpr float PARTS = 0x1.8p19f;
  static constexpr float ROOTS[] = {0x1.fef9a0p-1f, 0x1.0acc88p+0f, 0x1.169c74p+0f, 0x1.22f242p+0f,
                                    0x1.2fd3dep+0f, 0x1.3d477ap+0f, 0x1.4b538cp+0f, 0x1.59fed4p+0f,
                                    0x1.695060p+0f, 0x1.794f8ap+0f, 0x1.8a0402p+0f, 0x1.9b75d2p+0f,
                                    0x1.adad58p+0f, 0x1.c0b358p+0f, 0x1.d490f4p+0f, 0x1.e94fbap+0f};
  static constexpr float EXP2_NEAR[] = {0x1.06e6bap-9f, 0x1.639a6ap-1f, 0x1.ecfc32p-3f,
                                        0x1.c79c14p-5f};
  static constexpr float EXP_NEAR[] = {0x1.06e6bap-9f, 0x1.008374p+0f, 0x1.008560p-1f,
                                       0x1.560624p-3f};
#else
  static constexpr float PARTS = 0x1.8p20f;
  // As bits, of which i·2^20 is taken: adding a number of eighths, times 2^20, gives it back, and adds
  // what is whole to the exponent. They are 0x1.feb052p-1, 0x1.16747cp+0, 0x1.2fa848p+0, 0x1.4b2404p+0,
  // 0x1.691c8ap+0, 0x1.89cb7cp+0, 0x1.ad6fb4p+0 and 0x1.d44dbcp+0.
  static constexpr int32_t ROOTS[] = {0x3f7f5829, 0x3f7b3a3e, 0x3f77d424, 0x3f759202,
                                      0x3f748e45, 0x3f74e5be, 0x3f76b7da, 0x3f7a26de};
  static constexpr float EXP2_NEAR[] = {0x1.508a8ap-9f, 0x1.63cd76p-1f, 0x1.ed4f22p-3f,
                                        0x1.c7e9d0p-5f};
  static constexpr float EXP_NEAR[] = {0x1.508a8ap-9f, 0x1.00a846p+0f, 0x1.00b088p-1f,
                                       0x1.564080p-3f};
#endif
  static constexpr float WHOLE = 0x1p23f;
  static constexpr float SIN[] = {0x1.921fb6p1f, -0x1.4abbc4p2f, 0x1.4668fp1f, -0x1.32531ep-1f,
                                  0x1.3e142p-4f};
  static constexpr float COS[] = {-0x1.3bd3ccp2f, 0x1.03c1eep2f, -0x1.55d24ap0f, 0x1.e16eacp-3f,
                                  -0x1.937d98p-6f};
};

struct F64 {
  using Real = double;
  typedef double Vector __attribute__((vector_size(WIDTH)));
  typedef Vector Wide;
  typedef int64_t Integers __attribute__((vector_size(WIDTH)));
  typedef uint64_t Bits __attribute__((vector_size(WIDTH)));
  static constexpr int LANES = WIDTH / 8, MANTISSA = 52, BIAS = 1023;
  static constexpr double LOWEST = -746.0, HIGHEST = 710.0;
  static constexpr double FAR = 0x1p148, NEAR = 1021;
  static constexpr double ROUND = 0x1.8p52, LOG2E = 0x1.71547652b82fep0;
  static constexpr double LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;
  static constexpr double EXP[] = {
      0.5,
      0x1.5555555555556p-3,
      0x1.5555555553d68p-5,
      0x1.11111111109b5p-7,
      0x1.6c16c17889ef1p-10,
      0x1.a01a01a7c2efep-13,
      0x1.a019b9149a41cp-16,
      0x1.71de0db2f6b19p-19,
      0x1.28917c89a43a7p-22,
      0x1.af389ecfc4b9cp-26};
  static constexpr double EXP2[] = {
      0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a0c2p-5,  0x1.3b2ab6fba1ddap-7,
      0x1.5d87fe78a5276p-10, 0x1.430913096fd9fp-13, 0x1.ffcbfc670dcd4p-17, 0x1.62bfd47773353p-20,
      0x1.b524fae627834p-24, 0x1.e6063f7217bc6p-28, 0x1.e9d3fe3952179p-32};
  static constexpr double LOG1P[] = {
      0x1p+0, -0x1.fffffffffffe2p-2, 0x1.555555555426cp-2, -0x1.ffffffff675fp-3,
      0x1.999999851ab6dp-3, -0x1.555553a360d3bp-3, 0x1.2492310403adp-3, -0x1.fffe16d429dd8p-4,
      0x1.c70e13a2c5d8ep-4, -0x1.99470de1e7dfcp-4, 0x1.72ea81f4306bfp-4, -0x1.502a5940104acp-4,
      0x1.2c324b858157p-4, -0x1.01965f46f9127p-4, 0x1.9a3bf844ccce4p-5, -0x1.2310e9937c018p-5,
      0x1.606fc4b32e031p-6, -0x1.5bd286de8976p-7, 0x1.0946fb1ce4ee5p-8, -0x1.22d14be88b9f2p-10,
      0x1.956569bb68299p-13, -0x1.0cc64e91b8745p-16};
  static constexpr double WHOLE = 0x1p52;
  static constexpr double SIN[] = {
      0x1.921fb54442d18p1,   -0x1.4abbce625be52p2,  0x1.466bc6775aa7dp1,
      -0x1.32d2cce627c86p-1, 0x1.5078348551854p-4,  -0x1.e3074dfaf87afp-8,
      0x1.e8f3675ee37ddp-12, -0x1.6f7acdb8f658p-16, 0x1.9d462020fcc78p-21};
  static constexpr double COS[] = {
      -0x1.3bd3cc9be45dep2, 0x1.03c1f081b5a9fp2,   -0x1.55d3c7e3c9051p0,  0x1.e1f5068620bcbp-3,
      -0x1.a6d1f12b0bef2p-6, 0x1.f9d2c1f3b2167p-10, -0x1.b6a6feabe52e9p-14, 0x1.179a329ef414p-18};
};

}  // namespace fuseport::FUSEPORT_ISA
