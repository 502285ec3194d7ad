//! Rotary position embedding (RoPE) on slices of rows.
//!
//! The angles of a pass are computed once, from frequencies that already hold YaRN's correction,
//! and serve all layers.

use crate::{
    DType, Float, Stream, Tensor,
    ops::{
        linear::HeadLayout,
        rows::{RowsMut, for_rows},
    },
};

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// (x\[2i\], x\[2i+1\]): GPT-J's layout, used by the DeepSeek family.
    Interleaved,
    /// (x\[i\], x\[i + dim/2\]): GPT-NeoX's layout, used by Llama.
    HalfSplit,
}

/// cos and sin of position · frequency for the rows of one pass, times the attention factor.
#[derive(Debug)]
pub struct RopeAngles {
    frequencies: Vec<f32>,
    factor: f32,
    pairing: Pairing,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeAngles {
    /// Angles for at most `rows_max` rows. `frequencies` has one value a pair, in radians a
    /// position; `factor` multiplies cos and sin.
    pub fn new(frequencies: Vec<f32>, factor: f32, pairing: Pairing, rows_max: usize) -> Self {
        let capacity = frequencies.len() * rows_max;
        let (cos, sin) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        Self { frequencies, factor, pairing, cos, sin }
    }

    /// Number of rotated elements of a head (twice the pairs).
    pub fn dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Computes the angles of rows at `positions`, in f32.
    pub fn set_positions(&mut self, positions: &[u32]) {
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for &frequency in &self.frequencies {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                self.cos.push(cos * self.factor);
                self.sin.push(sin * self.factor);
            }
        }
    }

    /// Turns one head of row `row` in place.
    #[inline]
    pub(crate) fn rotate<T: Float>(&self, row: usize, head: &mut [T]) {
        let pairs = self.frequencies.len();
        debug_assert_eq!(head.len(), 2 * pairs);
        let cos = &self.cos[row * pairs..(row + 1) * pairs];
        let sin = &self.sin[row * pairs..(row + 1) * pairs];
        for pair in 0..pairs {
            let (first, second) = match self.pairing {
                Pairing::Interleaved => (2 * pair, 2 * pair + 1),
                Pairing::HalfSplit => (pair, pair + pairs),
            };
            let (a, b) = (head[first].to_f32(), head[second].to_f32());
            head[first] = T::from_f32(a * cos[pair] - b * sin[pair]);
            head[second] = T::from_f32(a * sin[pair] + b * cos[pair]);
        }
    }
}

/// Turns `heads` slices of each row of `x`, in place: head h is the `angles.dim()` elements from
/// `layout.offset + h · layout.stride` on.
///
/// # Panics
/// If a head lies outside the row, or the type is no float.
pub fn rope(
    stream: &Stream,
    x: &mut Tensor,
    layout: HeadLayout,
    heads: usize,
    angles: &RopeAngles,
) {
    match x.dtype() {
        DType::F32 => rope_rows::<f32>(stream, x, layout, heads, angles),
        DType::BF16 => rope_rows::<half::bf16>(stream, x, layout, heads, angles),
        DType::F16 => rope_rows::<half::f16>(stream, x, layout, heads, angles),
        other => panic!("RoPE of {other}"),
    }
}

fn rope_rows<T: Float>(
    stream: &Stream,
    x: &mut Tensor,
    layout: HeadLayout,
    heads: usize,
    angles: &RopeAngles,
) {
    for_rows(stream, RowsMut::<T>::new(x), 16, |row, values| {
        for head in 0..heads {
            let start = layout.offset + head * layout.stride;
            angles.rotate(row, &mut values[start..start + angles.dim()]);
        }
    });
}

/// Copies `width` elements of each of `heads` heads from rows of `x` to rows of `out`.
///
/// # Panics
/// If a head lies outside a row, or types or rows differ.
pub fn copy_heads(
    x: &Tensor,
    from: HeadLayout,
    out: &mut Tensor,
    to: HeadLayout,
    heads: usize,
    width: usize,
) {
    assert_eq!((x.rows(), x.dtype()), (out.rows(), out.dtype()));
    fn copy<T: Float>(
        x: &Tensor,
        from: HeadLayout,
        out: &mut Tensor,
        to: HeadLayout,
        heads: usize,
        width: usize,
    ) {
        let (wide_in, wide_out) = (x.width(), out.width());
        let rows = x.as_slice::<T>().chunks_exact(wide_in);
        for (source, target) in rows.zip(out.as_mut_slice::<T>().chunks_exact_mut(wide_out)) {
            for head in 0..heads {
                let (start, end) = (from.offset + head * from.stride, to.offset + head * to.stride);
                target[end..end + width].copy_from_slice(&source[start..start + width]);
            }
        }
    }
    match x.dtype() {
        DType::F32 => copy::<f32>(x, from, out, to, heads, width),
        DType::BF16 => copy::<half::bf16>(x, from, out, to, heads, width),
        DType::F16 => copy::<half::f16>(x, from, out, to, heads, width),
        other => panic!("copy of {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_turn_by_their_angle() {
        let stream = Stream::host(1).unwrap();
        let x: Vec<f32> = (0..10).map(|i| i as f32).collect();
        for (pairing, pairs) in
            [(Pairing::Interleaved, [(0, 1), (2, 3)]), (Pairing::HalfSplit, [(0, 2), (1, 3)])]
        {
            let frequencies = vec![1.0, 0.25];
            let mut angles = RopeAngles::new(frequencies.clone(), 1.0, pairing, 1);
            angles.set_positions(&[3]);
            let mut tensor = Tensor::from_slice(&[1, 10], &x);
            rope(&stream, &mut tensor, HeadLayout { offset: 1, stride: 5 }, 2, &angles);
            let got = tensor.as_slice::<f32>();
            for head in 0..2 {
                let start = 1 + 5 * head;
                for (pair, (first, second)) in pairs.into_iter().enumerate() {
                    let angle = 3.0 * f64::from(frequencies[pair]);
                    let (a, b) = (f64::from(x[start + first]), f64::from(x[start + second]));
                    let first_expected = a * angle.cos() - b * angle.sin();
                    let second_expected = a * angle.sin() + b * angle.cos();
                    assert!((f64::from(got[start + first]) - first_expected).abs() < 1e-5);
                    assert!((f64::from(got[start + second]) - second_expected).abs() < 1e-5);
                }
            }
            assert_eq!((got[0], got[5]), (0.0, 5.0), "what lies between heads is left alone");
        }
    }

    #[test]
    fn heads_are_copied_between_layouts() {
        let x = Tensor::from_slice(&[2, 4], &[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let mut out = Tensor::zeros(DType::F32, &[2, 6]);
        let (from, to) = (HeadLayout { offset: 1, stride: 2 }, HeadLayout { offset: 2, stride: 3 });
        copy_heads(&x, from, &mut out, to, 2, 1);
        assert_eq!(out.as_slice::<f32>()[..6], [0.0, 0.0, 1.0, 0.0, 0.0, 3.0]);
    }
}
