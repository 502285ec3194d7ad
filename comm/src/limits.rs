//! Facts about back ends: what one can do here, or why it cannot be used.

use std::ops::RangeInclusive;

use paceline_kernels::DType;

use crate::Collective;

/// What a back end can do in a given group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The collectives that it serves.
    pub collectives: &'static [Collective],
    /// Types that it can sum and compare.
    pub dtypes_reduced: &'static [DType],
    /// Types that it can gather and broadcast.
    pub dtypes_moved: &'static [DType],
    /// Bytes of one call.
    pub bytes: RangeInclusive<usize>,
    /// Number of ranks.
    pub world_sizes: RangeInclusive<usize>,
    /// Whether all-reduce may write where it reads.
    pub in_place: bool,
    /// Whether calls can be captured in a CUDA graph.
    pub graph_capture: bool,
}

impl Limits {
    /// Why a call is outside these limits; `None` if it is inside.
    pub fn objection(
        &self,
        collective: Collective,
        dtype: DType,
        bytes: usize,
        world_size: usize,
    ) -> Option<String> {
        let dtypes = if collective.reduces() { self.dtypes_reduced } else { self.dtypes_moved };
        if !self.collectives.contains(&collective) {
            return Some(format!("has no {collective}"));
        }
        if collective != Collective::Barrier && !dtypes.contains(&dtype) {
            return Some(format!("has no {collective} of {dtype}"));
        }
        if !self.bytes.contains(&bytes) {
            let (low, high) = (self.bytes.start(), self.bytes.end());
            return Some(format!("takes {low} to {high} bytes, not {bytes}"));
        }
        if !self.world_sizes.contains(&world_size) {
            let (low, high) = (self.world_sizes.start(), self.world_sizes.end());
            return Some(format!("takes {low} to {high} ranks, not {world_size}"));
        }
        None
    }
}

/// Why a back end cannot be used, with the next step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No back end has this name.
    #[error("there is no back end `{name}`; the names are {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// All names.
        known: String,
    },
    /// The back end is not part of this build.
    #[error("back end `{name}` is not in this build, which has {compiled}: choose one of those")]
    NotCompiled {
        /// The name asked for.
        name: String,
        /// The names that this build has.
        compiled: String,
    },
    /// A library, device or kernel interface that the back end needs is missing.
    #[error("back end `{name}` needs {what}, which was not found: {next_step}")]
    NotFound {
        /// The back end.
        name: &'static str,
        /// What is missing.
        what: String,
        /// What to do about it.
        next_step: String,
    },
    /// The machine or the placement of the ranks rules the back end out.
    #[error("back end `{name}` is not possible here, because {why}: {next_step}")]
    NotPossible {
        /// The back end.
        name: &'static str,
        /// The fact that rules it out.
        why: String,
        /// What to do about it.
        next_step: String,
    },
}
