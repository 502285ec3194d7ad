//! What ranks reduce, and what must come out. Pure.
//!
//! Inputs are small integers, so that sums are exact in every element type and in every order. They
//! repeat with a prime period, so that pieces put into the wrong place show; each call has them
//! shifted by one, so that a piece left from the call before shows too.

use paceline_kernels::Float;

/// Elements after which inputs repeat: a prime.
const PERIOD: usize = 4093;
/// Most that a sum may be: bf16 has all whole numbers up to 256, and the dependent form needs those
/// between an input and a sum.
const SUM_MAX: i32 = 128;
/// Most that an input may be.
const INPUT_MAX: i32 = 8;

/// The inputs of all ranks, and their sums.
pub(super) struct Inputs {
    /// By rank, one period.
    ranks: Vec<Vec<i32>>,
    sums: Vec<i32>,
}

impl Inputs {
    /// For `world` ranks, at most 64.
    pub(super) fn new(world: usize) -> Self {
        let bound = INPUT_MAX.min(SUM_MAX / world as i32);
        let input = |rank: usize, index: usize| {
            // The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
            let mut bits = ((rank * PERIOD + index + 1) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((bits >> 33) % (2 * bound as u64 + 1)) as i32 - bound
        };
        let ranks: Vec<Vec<i32>> =
            (0..world).map(|rank| (0..PERIOD).map(|index| input(rank, index)).collect()).collect();
        let sum = |index: usize| ranks.iter().map(|inputs| inputs[index]).sum();
        let sums = (0..PERIOD).map(sum).collect();
        Self { ranks, sums }
    }

    /// `count` elements of a rank's input from index `shift` on.
    pub(super) fn input<T: Float>(&self, rank: usize, shift: usize, count: usize) -> Vec<T> {
        elements(shift, count, |index| self.ranks[rank][index])
    }

    /// What all ranks must have after they have reduced the inputs with this shift.
    pub(super) fn sum<T: Float>(&self, shift: usize, count: usize) -> Vec<T> {
        elements(shift, count, |index| self.sums[index])
    }

    /// What makes a rank's input with shift `s + 1` of the sum with shift `s`, when the part from
    /// index `s` on is added.
    pub(super) fn step<T: Float>(&self, rank: usize, shift: usize, count: usize) -> Vec<T> {
        elements(shift, count, |index| self.ranks[rank][(index + 1) % PERIOD] - self.sums[index])
    }

    /// How many of `found` are not, to the bit, the sums with this shift.
    pub(super) fn wrong<T: Float>(&self, found: &[T], shift: usize) -> u64 {
        let expected = self.sums.iter().cycle().skip(shift % PERIOD);
        let differs = |(found, &expected): (&T, &i32)| {
            found.to_f32().to_bits() != (expected as f32).to_bits()
        };
        found.iter().zip(expected).filter(|&pair| differs(pair)).count() as u64
    }
}

fn elements<T: Float>(shift: usize, count: usize, value: impl Fn(usize) -> i32) -> Vec<T> {
    let period: Vec<T> = (0..PERIOD).map(|index| T::from_f32(value(index) as f32)).collect();
    period.iter().copied().cycle().skip(shift % PERIOD).take(count).collect()
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// Sums and steps have no rounding in any type, and a step leads from a sum to the next input.
    fn exact<T: Float>(world: usize) {
        let inputs = Inputs::new(world);
        let count = PERIOD + 3;
        let mut sums = vec![0.0; count];
        for rank in 0..world {
            let own: Vec<T> = inputs.input(rank, 1, count);
            sums.iter_mut().zip(&own).for_each(|(sum, own)| *sum += own.to_f32());
            let before: Vec<T> = inputs.sum(0, count);
            let step: Vec<T> = inputs.step(rank, 0, count);
            for ((before, step), own) in before.iter().zip(&step).zip(&own) {
                let made = T::from_f32(before.to_f32() + step.to_f32());
                assert_eq!(made.to_f32().to_bits(), own.to_f32().to_bits());
            }
        }
        let mut sums: Vec<T> = sums.into_iter().map(T::from_f32).collect();
        assert_eq!(inputs.wrong(&sums, 1), 0);
        assert!(inputs.wrong(&sums, 0) > count as u64 / 2, "a late piece would not show");
        sums[PERIOD] = T::from_f32(300.0);
        assert_eq!(inputs.wrong(&sums, 1), 1);
    }

    #[test]
    fn sums_are_exact_in_every_type() {
        for world in [2, 3, 8, 64] {
            exact::<f32>(world);
            exact::<f16>(world);
            exact::<bf16>(world);
        }
    }

    #[test]
    fn ranks_differ() {
        let inputs = Inputs::new(4);
        assert!((1..4).all(|rank| inputs.ranks[rank] != inputs.ranks[0]));
    }
}
