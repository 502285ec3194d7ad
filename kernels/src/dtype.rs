//! Element types of tensors.

use half::{bf16, f16};

/// Element type of a [`Tensor`](crate::Tensor). Multi-byte elements are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// FP8 E4M3FN (OCP 8-bit floating point, without infinities).
    F8E4M3,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// One byte a value, 0 or 1.
    Bool,
}

impl DType {
    /// All types, in the order of their declaration.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::F8E4M3,
        Self::I64,
        Self::I32,
        Self::U8,
        Self::I8,
        Self::Bool,
    ];

    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::I64 => 8,
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8E4M3 | Self::U8 | Self::I8 | Self::Bool => 1,
        }
    }

    /// Whether this is one of the floating-point types that activations may have.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// The name used in messages and on the command line (`f32`, `bf16`, …).
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F8E4M3 => "f8_e4m3",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::Bool => "bool",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be the element of a host [`Tensor`](crate::Tensor).
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// The matching [`DType`].
    const DTYPE: DType;
}

/// A floating-point element that activations may have; arithmetic is always done in f32.
pub trait Float: Element {
    /// Widens to f32, exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust { const DTYPE: DType = DType::$dtype; }
    )*};
}
element!(f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, i32 => I32, u8 => U8, i8 => I8);

impl Float for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}
impl Float for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
}
impl Float for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}

/// Decodes one FP8 E4M3FN code (exponent bias 7, no infinity, 0x7F and 0xFF are NaN).
pub fn f8e4m3_to_f32(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from((code >> 3) & 0xF);
    let mantissa = f32::from(code & 7);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * (-9f32).exp2(),
        _ => (1.0 + mantissa / 8.0) * ((exponent - 7) as f32).exp2(),
    };
    sign * magnitude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_types_are_in_the_order_of_their_declaration() {
        for (place, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, place, "{dtype}");
        }
    }

    #[test]
    fn f8_codes_named_by_the_format() {
        assert_eq!(f8e4m3_to_f32(0x38), 1.0);
        assert_eq!(f8e4m3_to_f32(0x7E), 448.0);
        assert_eq!(f8e4m3_to_f32(0x01), 2f32.powi(-9));
        assert_eq!(f8e4m3_to_f32(0xB8), -1.0);
        assert!(f8e4m3_to_f32(0x7F).is_nan() && f8e4m3_to_f32(0xFF).is_nan());
    }

    #[test]
    fn bf16_widening_is_exact() {
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits);
            let wide = Float::to_f32(value);
            assert!(wide.is_nan() || wide == value.to_f32());
        }
    }
}
