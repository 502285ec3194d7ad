//! Stop ids.
