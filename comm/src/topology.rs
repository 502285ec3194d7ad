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
    /// Whether they compute on GPUs, each on the one that it was given, or else on the CPU.
    pub on_devices: bool,
}

impl std::fmt::Display for Topology {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = match self.placement {
            Placement::Threads => "threads of one process",
            Placement::Processes => "processes of one machine",
            Placement::Machines => "processes of several machines",
        };
        write!(formatter, "{} ranks as {place}", self.world_size)
    }
}
