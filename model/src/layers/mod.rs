//! The layers of a decoder, each written once over the operators of `paceline-kernels`.

pub(crate) mod latent_attention;
pub(crate) mod moe;
