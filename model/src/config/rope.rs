//! Rotary position embedding: the checked parameters, and the numbers that follow from them.
//!
//! Covers plain RoPE (Su et al., "RoFormer", section 3.4) and YaRN (Peng et al., "YaRN: Efficient
//! Context Window Extension", sections 3.2-3.4) with DeepSeek's two magnitudes `mscale` and
//! `mscale_all_dim`. Invariant: a [`RopeConfig`] always gives finite frequencies.

use std::f64::consts::TAU;

use serde_json::json;

use super::section::Section;
use crate::ModelError;

/// Rotary embedding of one attention kind.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies (`rope_theta`), above 1.
    pub theta: f64,
    /// `true`: pair i is elements (2i, 2i+1); `false`: half-split pairs (i, i + dim/2).
    pub interleaved: bool,
    /// Context extension, if the file asks for it.
    pub yarn: Option<Yarn>,
}

/// YaRN parameters. They apply at every length, not only beyond `original_positions`.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Extension factor s, at least 1.
    pub factor: f64,
    /// Context length of the first training (L).
    pub original_positions: usize,
    /// Rotations over L above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations over L below which a frequency is fully interpolated.
    pub beta_slow: f64,
    /// Magnitude of cos and sin; 0 if absent.
    pub mscale: f64,
    /// Magnitude shared by all dimensions, moved into the softmax scale; 0 if absent.
    pub mscale_all_dim: f64,
    /// Explicit factor on cos and sin; overrides the ratio of the magnitudes.
    pub attention_factor: Option<f64>,
}

impl RopeConfig {
    /// Angle per position of each pair, `[dim / 2]`, largest first. `dim` is even.
    pub fn frequencies(&self, dim: usize) -> Vec<f32> {
        let plain = (0..dim / 2).map(|i| self.theta.powf(-(2.0 * i as f64) / dim as f64));
        let Some(yarn) = &self.yarn else { return plain.map(|f| f as f32).collect() };
        let (low, high) = yarn.correction_range(self.theta, dim);
        let mixed = plain.enumerate().map(|(i, frequency)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (frequency * (1.0 - ramp) + frequency / yarn.factor * ramp) as f32
        });
        mixed.collect()
    }

    /// Factor on cos and sin. 1 for every known model of the family.
    pub fn attention_factor(&self) -> f32 {
        let Some(yarn) = &self.yarn else { return 1.0 };
        let factor = yarn.attention_factor.unwrap_or_else(|| {
            if yarn.mscale != 0.0 && yarn.mscale_all_dim != 0.0 {
                yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
            } else {
                yarn.magnitude(1.0)
            }
        });
        factor as f32
    }

    /// Factor on the softmax scale of multi-head latent attention: the squared magnitude of
    /// `mscale_all_dim`, or 1. Drafts of the Llama kind do not use it (EAGLE-3 drafts are trained
    /// with the plain scale).
    pub fn softmax_factor(&self) -> f32 {
        self.softmax_factor_exact() as f32
    }

    pub(crate) fn softmax_factor_exact(&self) -> f64 {
        match &self.yarn {
            Some(yarn) if yarn.mscale_all_dim != 0.0 => yarn.magnitude(yarn.mscale_all_dim).powi(2),
            _ => 1.0,
        }
    }

    /// Reads `rope_parameters`, or `rope_theta` with `rope_scaling`.
    pub(crate) fn read(config: &Section<'_>, interleaved: bool) -> Result<Self, ModelError> {
        let outer_theta = config.number("rope_theta", THETA)?;
        let mut found: Option<RopeConfig> = None;
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(section) = config.section(key)? else { continue };
            let inner_theta = section.number("rope_theta", THETA)?;
            if let (Some(inner), Some(outer)) = (inner_theta, outer_theta)
                && inner != outer
            {
                let expected = format!("the value of `{}`, {outer}", config.full("rope_theta"));
                return Err(section.invalid("rope_theta", expected));
            }
            let theta = inner_theta.or(outer_theta).unwrap_or(THETA_DEFAULT);
            let rope = Self { theta, interleaved, yarn: Yarn::read(&section)? };
            if found.as_ref().is_some_and(|other| *other != rope) {
                let expected = "the same rotary embedding as `rope_parameters`";
                return Err(config.invalid(key, expected));
            }
            found = Some(rope);
        }
        let plain =
            || Self { theta: outer_theta.unwrap_or(THETA_DEFAULT), interleaved, yarn: None };
        Ok(found.unwrap_or_else(plain))
    }
}

impl Yarn {
    /// First and last pair of the ramp between kept and interpolated frequencies.
    pub fn correction_range(&self, theta: f64, dim: usize) -> (f64, f64) {
        let low = self.correction(self.beta_fast, theta, dim).floor().max(0.0);
        let high = self.correction(self.beta_slow, theta, dim).ceil().min(dim as f64 - 1.0);
        // The reference widens an empty ramp by the same amount.
        if low == high { (low, high + 0.001) } else { (low, high) }
    }

    /// Pair that turns `rotations` times over the original context.
    pub fn correction(&self, rotations: f64, theta: f64, dim: usize) -> f64 {
        let positions = self.original_positions as f64;
        dim as f64 * (positions / (TAU * rotations)).ln() / (2.0 * theta.ln())
    }

    /// Magnitude g(m) = 0.1 m ln(s) + 1.
    pub fn magnitude(&self, m: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * m * self.factor.ln() + 1.0 }
    }

    fn read(section: &Section<'_>) -> Result<Option<Self>, ModelError> {
        let (new, old) = (section.text("rope_type")?, section.text("type")?);
        let canonical = |name| if name == "deepseek_yarn" { "yarn" } else { name };
        if let (Some(new), Some(old)) = (new, old)
            && canonical(new) != canonical(old)
        {
            return Err(section.invalid("type", format!("the value of `rope_type`, \"{new}\"")));
        }
        // A key that is not known here may change the mathematics, so it is an error.
        section.only("truncate", &json!(true))?;
        section.number("partial_rotary_factor", 1.0..=1.0)?;
        let key = if new.is_some() { "rope_type" } else { "type" };
        let yarn = match new.or(old).map_or("default", canonical) {
            "default" => None,
            "yarn" => Some(Self::read_yarn(section)?),
            _ => {
                let expected = "\"default\", \"yarn\" or \"deepseek_yarn\"";
                return Err(section.invalid(key, expected));
            }
        };
        let unread = if yarn.is_some() { section.unread(&[]) } else { section.unread(YARN_KEYS) };
        match unread.into_iter().next() {
            None => Ok(yarn),
            Some(key) => Err(ModelError::ConfigValue {
                file: section.file().to_owned(),
                key,
                found: "a rotary parameter that is not known".to_owned(),
                expected: "rope_type, rope_theta and the YaRN parameters".to_owned(),
            }),
        }
    }

    fn read_yarn(section: &Section<'_>) -> Result<Self, ModelError> {
        let key = "factor";
        let factor = section.number(key, 1.0..=1e6)?;
        let yarn = Self {
            factor: factor.ok_or_else(|| section.missing(key, "a number of at least 1"))?,
            original_positions: section.size("original_max_position_embeddings", 1 << 30)?,
            beta_fast: section.number("beta_fast", 1e-3..=1e6)?.unwrap_or(32.0),
            beta_slow: section.number("beta_slow", 1e-3..=1e6)?.unwrap_or(1.0),
            mscale: section.number("mscale", 0.0..=1e3)?.unwrap_or(0.0),
            mscale_all_dim: section.number("mscale_all_dim", 0.0..=1e3)?.unwrap_or(0.0),
            attention_factor: section.number("attention_factor", 1e-3..=1e3)?,
        };
        if yarn.beta_fast < yarn.beta_slow {
            return Err(section.invalid("beta_fast", "a number not below beta_slow"));
        }
        Ok(yarn)
    }
}

/// Range of the base: logarithms of it must be positive.
const THETA: std::ops::RangeInclusive<f64> = 1.001..=1e15;
const THETA_DEFAULT: f64 = 10_000.0;
/// Without a type, left-over YaRN parameters mean nothing.
const YARN_KEYS: &[&str] = &[
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
];
