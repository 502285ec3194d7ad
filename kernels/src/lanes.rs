//! Arithmetic on fixed lanes, compiled once for each instruction set.
//!
//! A sum over a row always has the same shape: lane `l` of N adds elements N·i + l in order, then
//! the lanes are added as a tree. So its value depends on the row and the instruction set only.

/// Compiles `$body::<FMA, LANES>` for each instruction set and calls the one given.
macro_rules! multiversion {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident[$($generic:ident: $bound:path),*]
     ($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $visibility fn $name<$($generic: $bound),*>(isa: $crate::Isa, $($argument: $type),*)
            $(-> $output)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx2<$($generic: $bound),*>($($argument: $type),*) $(-> $output)? {
                    $body::<true, 8, $($generic),*>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
                #[allow(clippy::too_many_arguments)]
                fn avx512<$($generic: $bound),*>($($argument: $type),*) $(-> $output)? {
                    $body::<true, 16, $($generic),*>($($argument),*)
                }
                match isa {
                    $crate::Isa::Portable => {}
                    // SAFETY: a stream has this instruction set only if the processor has it.
                    $crate::Isa::Avx2 => return unsafe { avx2($($argument),*) },
                    // SAFETY: as above.
                    $crate::Isa::Avx512 => return unsafe { avx512($($argument),*) },
                }
            }
            let _ = isa;
            $body::<false, 8, $($generic),*>($($argument),*)
        }
    };
}
pub(crate) use multiversion;

/// a · b + c, fused where the instruction set has it (a call into libm would be slow).
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adds the lanes as a tree: halves are added to halves.
#[inline(always)]
pub(crate) fn tree_sum<const N: usize>(mut lanes: [f32; N]) -> f32 {
    let mut half = N / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// e^x within 2 units in the last place for −87 ≤ x ≤ 88; 0 below (Cephes' `expf` polynomial).
#[inline(always)]
pub(crate) fn exp<const FMA: bool>(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    // Adding 1.5 · 2²³ rounds to an integer in the low bits.
    let shifted = fma::<FMA>(clamped, LOG2_E, 12_582_912.0);
    let integer = shifted - 12_582_912.0;
    let rest = fma::<FMA>(integer, -LN2_HIGH, clamped);
    let rest = fma::<FMA>(integer, -LN2_LOW, rest);
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = fma::<FMA>(p, rest, coefficient);
    }
    let fraction = fma::<FMA>(p * rest, rest, rest) + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { fraction * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close() {
        let mut x = -87.0f32;
        while x < 88.0 {
            for value in [exp::<true>(x), exp::<false>(x)] {
                let exact = f64::from(x).exp();
                let error = (f64::from(value) - exact).abs() / exact;
                assert!(error < 3e-7, "exp({x}) = {value}, relative error {error}");
            }
            x += 0.0137;
        }
        assert_eq!(exp::<true>(-1e9), 0.0);
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp::<true>(0.0), 1.0);
    }

    #[test]
    fn tree_adds_all_lanes() {
        assert_eq!(tree_sum([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]), 36.0);
    }
}
