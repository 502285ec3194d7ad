//! Where the ranks of a group are.

/// How ranks are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Threads of one process.
    Threads,
    /// Processes of one machine.
    Processes,
    /// Processes of several machines.
    Machines,
}

/// Facts about a group that decide which back ends are possible. The same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Number of ranks.
    pub world_size: usize,
    /// Where they are.
    pub placement: Placement,
    /// Processors that rank 0 may use.
    pub processors: usize,
}

impl Topology {
    /// The facts of a group on this machine.
    pub fn local(world_size: usize, placement: Placement) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { world_size, placement, processors }
    }
}

impl std::fmt::Display for Topology {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = match self.placement {
            Placement::Threads => "threads of one process",
            Placement::Processes => "processes of one machine",
            Placement::Machines => "processes of several machines",
        };
        write!(formatter, "{} ranks as {place}, {} processors", self.world_size, self.processors)
    }
}
