//! What model code uses: collectives on tensors, each served by the back end of the policy.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use paceline_kernels::{DType, Stream, Tensor};

use crate::{
    Abort, Backend, COMPILED, Call, Collective, CommError, Connection, Group, Rank, ReduceOp,
    Result, Topology, Unavailable,
    backend::{self, host::algorithms},
    policy::{Candidate, Choice, Purpose, Reason, Rejection, Table, listed},
    protocol::Limit,
};

/// One rank's means of exchanging tensors with the others.
///
/// All ranks make the same calls in the same order, with the same sizes and types. On the CPU each
/// method blocks until this rank may go on, at most for the group's timeout; on a GPU it only puts
/// the work on the stream, see [`Communicator::synchronize`]. Every error but
/// [`CommError::Argument`] and [`CommError::NotServed`] (which all ranks get alike, without
/// communicating) ends the group; see [`CommError`].
///
/// With one rank every collective is the identity and costs nothing.
pub struct Communicator {
    group: Group,
    connected: Vec<Connected>,
    declined: Vec<Declined>,
    /// By collective and element type.
    tables: Vec<Table>,
    messages: Count,
}

struct Connected {
    name: &'static str,
    connection: Box<dyn Connection>,
    counts: [Count; Collective::ALL.len()],
}

#[derive(Clone, Copy, Default)]
struct Count {
    calls: u64,
    bytes: u64,
    time: Duration,
}

impl Count {
    fn add(&mut self, bytes: usize, started: Instant) {
        self.calls += 1;
        self.bytes += bytes as u64;
        self.time += started.elapsed();
    }
}

/// How often a back end was used, on this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usage {
    /// The back end.
    pub backend: &'static str,
    /// The collective.
    pub collective: Collective,
    /// Calls that succeeded.
    pub calls: u64,
    /// Bytes of this rank's inputs (outputs, where it only receives).
    pub bytes: u64,
    /// Seconds that this rank spent in starting them, and on the CPU in waiting for the others.
    pub seconds: f64,
}

/// A back end that is not used, because one rank could not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declined {
    /// The back end.
    pub backend: &'static str,
    /// The first rank that could not use it.
    pub rank: Rank,
    /// That rank's reason.
    pub reason: String,
}

impl Communicator {
    /// Connects a group: through the back end called `backend`, or with `None` (or `"auto"`)
    /// through all that every rank can use. All ranks call this, each in its thread or process.
    ///
    /// # Errors
    /// [`CommError::Unavailable`] if a back end asked for by name cannot be used; failures of
    /// the group.
    pub fn connect(group: Group, backend: Option<&str>) -> Result<Self> {
        match backend.filter(|&name| name != "auto") {
            None => Self::connect_to(group, COMPILED),
            Some(name) => {
                let backend = backend::find(name)?;
                let communicator = Self::connect_to(group, &[backend])?;
                communicator.require(backend)?;
                Ok(communicator)
            }
        }
    }

    /// A communicator of one rank.
    pub fn alone() -> Self {
        Self {
            group: Group::alone(),
            connected: Vec::new(),
            declined: Vec::new(),
            tables: Vec::new(),
            messages: Count::default(),
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// This rank's number among those of its machine.
    pub fn local_rank(&self) -> usize {
        self.group.local_rank()
    }

    /// Where the ranks are.
    pub fn topology(&self) -> &Topology {
        self.group.topology()
    }

    /// Combines `x` of all ranks, in place: afterwards every rank has the same bits.
    ///
    /// # Errors
    /// See [`Communicator`]. [`CommError::NotServed`] if the type is not f32, f16 or bf16.
    ///
    /// # Panics
    /// If `x` is a view, and so read-only.
    pub fn all_reduce(&mut self, x: &mut Tensor, op: ReduceOp, stream: &Stream) -> Result<()> {
        self.enqueue(Call::AllReduce { x, op }, stream)
    }

    /// As [`all_reduce`](Self::all_reduce), into another tensor: `x` stays as it is.
    ///
    /// # Errors
    /// See [`Communicator`]. [`CommError::Argument`] if `out` has another size or type.
    ///
    /// # Panics
    /// If `out` is a view, and so read-only.
    pub fn all_reduce_into(
        &mut self,
        x: &Tensor,
        out: &mut Tensor,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        if x.dtype() != out.dtype() || x.len() != out.len() {
            let reason = format!("out is {out:?}, but must be like x, {x:?}");
            return Err(CommError::Argument { collective: Collective::AllReduce, reason });
        }
        self.enqueue(Call::AllReduceInto { x, out, op }, stream)
    }

    /// Combines `x` of all ranks; this rank gets its part in `out`. The parts are equally long
    /// and in order of rank, so with a row-major `x` they are ranges of its first dimension.
    ///
    /// # Errors
    /// See [`Communicator`]. [`CommError::Argument`] if `out` is not world size times smaller.
    ///
    /// # Panics
    /// If `out` is a view, and so read-only.
    pub fn reduce_scatter(
        &mut self,
        x: &Tensor,
        out: &mut Tensor,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.check_sizes(Collective::ReduceScatter, (out, "out"), (x, "x"))?;
        self.enqueue(Call::ReduceScatter { x, out, op }, stream)
    }

    /// Puts `x` of all ranks one after the other into `out`, in order of rank.
    ///
    /// # Errors
    /// See [`Communicator`]. [`CommError::Argument`] if `out` is not world size times larger.
    ///
    /// # Panics
    /// If `out` is a view, and so read-only.
    pub fn all_gather(&mut self, x: &Tensor, out: &mut Tensor, stream: &Stream) -> Result<()> {
        self.check_sizes(Collective::AllGather, (x, "x"), (out, "out"))?;
        self.enqueue(Call::AllGather { x, out }, stream)
    }

    /// Copies the root's `x` into that of the others.
    ///
    /// # Errors
    /// See [`Communicator`].
    ///
    /// # Panics
    /// If `x` is a view, and so read-only.
    pub fn broadcast(&mut self, x: &mut Tensor, root: Rank, stream: &Stream) -> Result<()> {
        self.check_root(Collective::Broadcast, root)?;
        self.enqueue(Call::Broadcast { x, root }, stream)
    }

    /// Waits until all ranks are here and `stream` has got here.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn barrier(&mut self, stream: &Stream) -> Result<()> {
        self.enqueue(Call::Barrier, stream)
    }

    /// Sends the root's message to the others, whose vector is replaced. They need not know its
    /// length. This is how rank 0 tells the others what the next step is.
    ///
    /// The others wait for the root **without a deadline**, because a group may idle for hours
    /// between requests; they notice the root's death within about 20 ms, and its leaving or an
    /// abort at once. The root does not wait for the others to come, only for the call before
    /// to be over, which has the deadline.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn broadcast_bytes(&mut self, message: &mut Vec<u8>, root: Rank) -> Result<()> {
        self.send_bytes(message, root, Limit::Liveness)
    }

    /// As [`broadcast_bytes`](Self::broadcast_bytes), for receivers that do not idle: if the root
    /// does not come within the group's timeout, they get [`CommError::Timeout`]. Ranks may call
    /// one or the other.
    ///
    /// # Errors
    /// See [`Communicator`].
    pub fn broadcast_bytes_in_time(&mut self, message: &mut Vec<u8>, root: Rank) -> Result<()> {
        self.send_bytes(message, root, Limit::Deadline)
    }

    fn send_bytes(&mut self, message: &mut Vec<u8>, root: Rank, limit: Limit) -> Result<()> {
        self.check_root(Collective::BroadcastBytes, root)?;
        let Some(channel) = self.group.channel_mut() else { return Ok(()) };
        let started = Instant::now();
        algorithms::broadcast_bytes(channel, message, root, limit)?;
        self.messages.add(message.len(), started);
        Ok(())
    }

    /// Makes the memory of `tensor` known to the back ends that need it. All ranks register
    /// the same number of tensors, in the same order.
    ///
    /// # Errors
    /// Those of the back ends.
    pub fn register(&mut self, tensor: &Tensor) -> Result<()> {
        for connected in &mut self.connected {
            connected.connection.register(&mut self.group, tensor)?;
        }
        Ok(())
    }

    /// Whether the group can still be used: looks for failures and lost ranks, and does not wait.
    ///
    /// # Errors
    /// The group's first failure.
    pub fn check(&mut self) -> Result<()> {
        self.check_connections()?;
        self.group.check()
    }

    /// A handle that another thread can use to free this rank, and with it the whole group.
    pub fn abort_handle(&self) -> Arc<dyn Abort> {
        let handles =
            self.connected.iter().map(|connected| connected.connection.abort_handle(&self.group));
        Arc::new(AbortAll { group: self.group.abort_handle(), backends: handles.collect() })
    }

    /// How often each back end served each collective, and how long that took; what was never
    /// used is left out. Messages are counted for `host`, whose memory carries them.
    pub fn counts(&self) -> Vec<Usage> {
        let mut usage = Vec::new();
        let mut push = |backend, collective, Count { calls, bytes, time }| {
            if calls > 0 {
                let seconds = time.as_secs_f64();
                usage.push(Usage { backend, collective, calls, bytes, seconds });
            }
        };
        for connected in &self.connected {
            for (&collective, &count) in Collective::ALL.iter().zip(&connected.counts) {
                push(connected.name, collective, count);
            }
        }
        push("host", Collective::BroadcastBytes, self.messages);
        usage
    }

    /// Which back end serves such a call, and why.
    ///
    /// # Errors
    /// [`CommError::NotServed`] with each back end's reason.
    pub fn backend_for(
        &self,
        collective: Collective,
        dtype: DType,
        bytes: usize,
    ) -> Result<Choice> {
        if self.world_size() == 1 {
            let reason = Reason::Alone;
            return Ok(Choice { index: 0, name: "none", reason, rejected: Vec::new() });
        }
        match self.table(collective, dtype).at(bytes) {
            Ok(choice) => Ok(choice.clone()),
            Err(rejected) => {
                let reasons = self.reasons(rejected);
                Err(CommError::NotServed { collective, bytes, dtype, reasons })
            }
        }
    }

    /// Which back end serves which sizes.
    ///
    /// # Panics
    /// If there is one rank.
    pub fn table(&self, collective: Collective, dtype: DType) -> &Table {
        &self.tables[table_index(collective, dtype)]
    }

    /// Back ends that are not used, and why.
    pub fn declined(&self) -> &[Declined] {
        &self.declined
    }

    pub(crate) fn connect_to(mut group: Group, backends: &[&dyn Backend]) -> Result<Self> {
        if group.world_size() == 1 {
            return Ok(Self { group, ..Self::alone() });
        }
        check_same_backends(&mut group, backends)?;
        let mut connected = Vec::new();
        let mut declined = Vec::new();
        for backend in backends {
            match connect_one(&mut group, *backend)? {
                Ok(connection) => connected.push(connection),
                Err(reason) => declined.push(reason),
            }
        }
        let tables = tables(&connected, group.world_size());
        Ok(Self { group, connected, declined, tables, messages: Count::default() })
    }

    /// Why nobody serves a call: each back end's reason.
    fn reasons(&self, rejected: &[Rejection]) -> String {
        let declined = |Declined { backend, rank, reason }: &Declined| {
            format!("{backend} is not used, because of rank {rank} ({reason})")
        };
        let rejected = (!rejected.is_empty()).then(|| listed(rejected));
        rejected
            .into_iter()
            .chain(self.declined.iter().map(declined))
            .collect::<Vec<_>>()
            .join("; ")
    }

    fn require(&self, backend: &dyn Backend) -> Result<()> {
        backend.probe(self.topology())?;
        match self.declined.first() {
            None => Ok(()),
            Some(Declined { rank, reason, .. }) => Err(Unavailable::NotPossible {
                name: backend.name(),
                why: format!("rank {rank} could not connect ({reason})"),
                next_step: "choose another back end, or `auto`".to_owned(),
            }
            .into()),
        }
    }

    #[inline]
    fn enqueue(&mut self, call: Call<'_>, stream: &Stream) -> Result<()> {
        if self.connected.is_empty() && self.world_size() == 1 {
            return backend::host::alone(call, stream);
        }
        let collective = call.collective();
        let (bytes, dtype) = call.payload();
        let table = &self.tables[table_index(collective, dtype)];
        let Ok(Choice { index, .. }) = *table.at(bytes) else {
            return self.backend_for(collective, dtype, bytes).map(|_| ());
        };
        let connected = &mut self.connected[index];
        let started = Instant::now();
        // SAFETY: the tensors are borrowed for the call, and operators on host tensors are over
        // when this returns. The policy has chosen by the connection's limits.
        unsafe { connected.connection.enqueue(&mut self.group, call, stream)? };
        connected.counts[collective as usize].add(bytes, started);
        Ok(())
    }

    fn check_sizes(
        &self,
        collective: Collective,
        (part, part_name): (&Tensor, &str),
        (whole, whole_name): (&Tensor, &str),
    ) -> Result<()> {
        let world_size = self.world_size();
        if part.dtype() == whole.dtype() && part.len() * world_size == whole.len() {
            return Ok(());
        }
        let reason = format!(
            "{whole_name} is {whole:?}, but must have the type of {part_name} ({part:?}) and \
             {world_size} times its elements, one part a rank"
        );
        Err(CommError::Argument { collective, reason })
    }

    fn check_root(&self, collective: Collective, root: Rank) -> Result<()> {
        if root.index() < self.world_size() {
            return Ok(());
        }
        let reason = format!("there is no rank {root} in a group of {}", self.world_size());
        Err(CommError::Argument { collective, reason })
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.connected.iter().map(|connected| connected.name).collect();
        write!(formatter, "Communicator({:?}, back ends {names:?})", self.group)
    }
}

struct AbortAll {
    group: Arc<dyn Abort>,
    backends: Vec<Arc<dyn Abort>>,
}

impl Abort for AbortAll {
    fn abort(&self, reason: &str) {
        self.group.abort(reason);
        self.backends.iter().for_each(|backend| backend.abort(reason));
    }
}

/// Ranks of different builds would connect different back ends; they learn that here.
fn check_same_backends(group: &mut Group, backends: &[&dyn Backend]) -> Result<()> {
    let names: Vec<_> = backends.iter().map(|backend| backend.name()).collect();
    let all = group.exchange(names.join(", ").as_bytes())?;
    let Some(rank) = all.iter().position(|names| *names != all[0]) else { return Ok(()) };
    let text = |names: &[u8]| String::from_utf8_lossy(names).into_owned();
    Err(CommError::SettingMismatch {
        setting: "the back ends to use".to_owned(),
        rank: Rank(rank),
        expected: text(&all[0]),
        found: text(&all[rank]),
    })
}

/// Probes and connects one back end on all ranks, and uses it only if all could. A rank that
/// cannot must say so, or the others would wait for it.
fn connect_one(group: &mut Group, backend: &dyn Backend) -> Result<Result<Connected, Declined>> {
    let name = backend.name();
    let probed = backend.probe(group.topology());
    let reason = probed.err().map(|unavailable| unavailable.to_string());
    if let Some(declined) = first_refusal(group, name, reason)? {
        return Ok(Err(declined));
    }
    let connection = backend.connect(group);
    let reason = connection.as_ref().err().map(CommError::to_string);
    if let Some(declined) = first_refusal(group, name, reason)? {
        return Ok(Err(declined));
    }
    let counts = [Count::default(); Collective::ALL.len()];
    Ok(Ok(Connected { name, connection: connection?, counts }))
}

/// The first rank that has a reason not to use a back end.
fn first_refusal(
    group: &mut Group,
    backend: &'static str,
    reason: Option<String>,
) -> Result<Option<Declined>> {
    let reasons = group.exchange(reason.unwrap_or_default().as_bytes())?;
    let refusal = reasons.iter().position(|reason| !reason.is_empty()).map(|rank| Declined {
        backend,
        rank: Rank(rank),
        reason: String::from_utf8_lossy(&reasons[rank]).into_owned(),
    });
    Ok(refusal)
}

fn tables(connected: &[Connected], world_size: usize) -> Vec<Table> {
    let candidates: Vec<_> = connected
        .iter()
        .map(|connected| Candidate { name: connected.name, limits: connected.connection.limits() })
        .collect();
    let purposes = Collective::ALL.iter().flat_map(|&collective| {
        DType::ALL.iter().map(move |&dtype| Purpose { collective, dtype, world_size })
    });
    purposes.map(|purpose| Table::new(&candidates, purpose, &[])).collect()
}

#[inline]
fn table_index(collective: Collective, dtype: DType) -> usize {
    collective as usize * DType::ALL.len() + dtype as usize
}

mod device;
#[cfg(test)]
mod tests;
