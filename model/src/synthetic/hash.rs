//! Values from names: the same on every machine and in every language.
//!
//! The bits of element i of a tensor are the i-th output of splitmix64 (Steele, Lea and Flood,
//! "Fast splittable pseudorandom number generators", 2014) seeded with FNV-1a of the name.
//! Pure. Start reading at [`Bits`].

use half::bf16;

/// The bits of a tensor's elements.
#[derive(Clone, Copy)]
pub(super) struct Bits {
    seed: u64,
}

impl Bits {
    pub(super) fn of(name: &str) -> Self {
        const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0100_0000_01b3;
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
        Self { seed: name.bytes().fold(OFFSET, mix) }
    }

    /// The 64 bits of an element, by flat row-major index.
    pub(super) fn at(self, index: usize) -> u64 {
        let mut z = self.seed.wrapping_add(index as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in \[0, 1\[.
    pub(super) fn unit(self, index: usize) -> f32 {
        (self.at(index) >> 40) as f32 / (1u32 << 24) as f32
    }
}

/// The float values of a tensor: norms near 1, router biases small, embeddings up to 1, and
/// matrices of unit gain for their `width` inputs.
pub(super) fn floats(name: &str, count: usize, width: usize) -> impl Iterator<Item = f32> {
    let bits = Bits::of(name);
    let gain = unit_gain(width);
    let norm = name.contains("layernorm") || name.ends_with("norm.weight");
    let bias = name.ends_with("e_score_correction_bias");
    let embedding = name.contains("embed_tokens");
    (0..count).map(move |index| {
        let value = 2.0 * bits.unit(index) - 1.0;
        match (norm, bias, embedding) {
            (true, ..) => 1.0 + 0.25 * value,
            (_, true, _) => 0.2 * value,
            (_, _, true) => value,
            _ => value * gain,
        }
    })
}

/// INT4 words, eight codes each.
pub(super) fn packed_words(name: &str, count: usize) -> impl Iterator<Item = i32> {
    let bits = Bits::of(name);
    (0..count).map(move |index| (bits.at(index) >> 32) as u32 as i32)
}

/// Scales of INT4 groups of a matrix of `width` inputs.
pub(super) fn group_scales(name: &str, count: usize, width: usize) -> impl Iterator<Item = bf16> {
    let bits = Bits::of(name);
    let gain = unit_gain(width) * 0.125;
    (0..count).map(move |index| bf16::from_f32(gain * (0.75 + 0.5 * bits.unit(index))))
}

/// FP8 codes, without NaN.
pub(super) fn fp8_codes(name: &str, count: usize) -> impl Iterator<Item = u8> {
    let bits = Bits::of(name);
    let code = move |index| (bits.at(index) >> 40) as u8;
    (0..count).map(move |index| if code(index) & 0x7F == 0x7F { 0 } else { code(index) })
}

/// Multipliers of FP8 blocks of a matrix of `width` inputs.
pub(super) fn block_scales(name: &str, count: usize, width: usize) -> impl Iterator<Item = f32> {
    let bits = Bits::of(name);
    let gain = unit_gain(width) / 256.0;
    (0..count).map(move |index| gain * (0.75 + 0.5 * bits.unit(index)))
}

fn unit_gain(width: usize) -> f32 {
    (3.0 / width as f64).sqrt() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values that the definition of the hash gives.
    #[test]
    fn values_are_those_of_the_definition() {
        let norm: Vec<f32> = floats("model.norm.weight", 4, 256).collect();
        assert_eq!(norm, [0.7743439, 0.91065085, 0.8300998, 0.97287476]);
        let head: Vec<f32> = floats("lm_head.weight", 4, 256).collect();
        for (value, expected) in head.iter().zip([0.10669, -0.05131089, -0.05566124, -0.08150979]) {
            assert!((value - expected).abs() < 1e-8, "{value} {expected}");
        }
    }
}
