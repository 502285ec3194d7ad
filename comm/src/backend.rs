//! The back ends of this build, and the trait that each implements.
//!
//! This is the only file in which cargo features are tested: each back end behind a feature has
//! one line here for its module and one in [`COMPILED`]. `host` is part of every build.

use crate::{Connection, Group, Limits, Result, Topology, Unavailable};

pub(crate) mod host;
#[cfg(feature = "p2p")]
mod p2p;

/// The back ends of this build, the preferred first.
pub static COMPILED: &[&dyn Backend] = &[
    #[cfg(feature = "p2p")]
    &p2p::P2p,
    &host::Host,
];

/// The names of all back ends, in this build or not: the same help text in every build.
pub const KNOWN: &[&str] = &["p2p", "host"];

/// A way for ranks to exchange tensors.
pub trait Backend: Sync {
    /// Its name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// What it could do in a group with these facts. Has no side effects.
    ///
    /// # Errors
    /// Why it cannot be used, with the next step.
    fn probe(&self, topology: &Topology) -> Result<Limits, Unavailable>;

    /// Connects this rank to the others, which all call this too. May block for the group's
    /// timeout, and allocate. Ranks can exchange what they need through the group.
    ///
    /// # Errors
    /// Those of the back end. If it fails on one rank, no rank uses it.
    fn connect(&self, group: &mut Group) -> Result<Box<dyn Connection>>;
}

/// The back end called `name`.
///
/// # Errors
/// [`Unavailable::NotCompiled`] if this build lacks it, [`Unavailable::Unknown`] if there is none.
pub fn find(name: &str) -> Result<&'static dyn Backend, Unavailable> {
    if let Some(backend) = COMPILED.iter().find(|backend| backend.name() == name) {
        return Ok(*backend);
    }
    let name = name.to_owned();
    if KNOWN.contains(&name.as_str()) {
        let compiled: Vec<_> = COMPILED.iter().map(|backend| backend.name()).collect();
        return Err(Unavailable::NotCompiled { name, compiled: compiled.join(", ") });
    }
    Err(Unavailable::Unknown { name, known: KNOWN.join(", ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_back_ends_or_to_reasons() {
        assert_eq!(find("host").map(Backend::name).ok(), Some("host"));
        for name in KNOWN.iter().filter(|name| COMPILED.iter().all(|b| b.name() != **name)) {
            let Err(reason) = find(name) else { panic!("{name} is not compiled") };
            assert!(matches!(reason, Unavailable::NotCompiled { .. }));
            assert!(reason.to_string().contains("host"), "{reason}");
        }
        let Err(reason) = find("gloo") else { panic!("there is no gloo") };
        assert!(matches!(&reason, Unavailable::Unknown { known, .. } if known.contains("host")));
    }

    #[test]
    fn every_compiled_back_end_is_known() {
        assert!(COMPILED.iter().all(|backend| KNOWN.contains(&backend.name())));
    }
}
