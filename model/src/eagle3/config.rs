//! Draft configuration.
