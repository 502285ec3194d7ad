//! EAGLE-3 draft models (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language
//! Models via Training-Time Test", 2025). Start reading at [`config`].

pub mod config;
pub mod draft;
