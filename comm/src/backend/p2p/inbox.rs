//! What the other ranks write into or read: one rank's boxes, and the words by which it fails and
//! stops.
//!
//! Threads of one process find each other's through a list of the process; the back end's own
//! exchange says under which number. Invariant: the list holds no memory alive.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use paceline_kernels::{
    driver::{self, Device, DeviceMemory, DevicePointer, DeviceStream, PinnedMemory, WAIT_LIMIT},
    ops::all_reduce::{Failure, OUTBOX_FLAG_BYTES, Way},
};

/// Slots of an inbox for each rank, and of an outbox: two parities of two stages.
const SLOTS: usize = 4;
/// How many times larger than an inbox's the slots of an outbox in GPU memory are: it serves large
/// tensors, and there is one for all ranks.
pub(super) const OUTBOX_SLOTS: usize = 4;
/// Nothing has been sent yet.
const ALL_ONES: u32 = u32::MAX;
/// Word of the abort flag: in another cache line than the failure.
const ABORT_WORD: usize = 32;

/// One rank's memory for the others.
pub(super) struct Inbox {
    boxes: Boxes,
    /// The failure from the start, the abort flag at [`ABORT_WORD`].
    control: PinnedMemory,
}

enum Boxes {
    /// Inboxes of what is combined and of what is only gathered; an outbox.
    OnDevice { combined: DeviceMemory, gathered: DeviceMemory, outbox: DeviceMemory },
    /// Of both.
    OnHost(PinnedMemory),
}

impl Inbox {
    /// Allocates and fills it: `world` ranks, slots of `slot_bytes`.
    pub(super) fn new(
        device: &Device,
        way: Way,
        world: usize,
        slot_bytes: usize,
    ) -> driver::Result<Self> {
        let boxes = match way {
            Way::Outbox | Way::HostOutbox => {
                let bytes = OUTBOX_FLAG_BYTES + SLOTS * slot_bytes;
                Boxes::OnHost(PinnedMemory::zeroed(device, bytes)?)
            }
            Way::Inbox => {
                let bytes = SLOTS * world * slot_bytes;
                let mut combined = DeviceMemory::zeroed(device, bytes)?;
                let stream = DeviceStream::new(device)?;
                combined.fill_u32(&stream, ALL_ONES)?;
                stream.synchronize_within(WAIT_LIMIT)?;
                let outbox = OUTBOX_FLAG_BYTES + SLOTS * OUTBOX_SLOTS * slot_bytes;
                Boxes::OnDevice {
                    combined,
                    gathered: DeviceMemory::zeroed(device, bytes)?,
                    outbox: DeviceMemory::zeroed(device, outbox)?,
                }
            }
        };
        Ok(Self { boxes, control: PinnedMemory::zeroed(device, 4 * (ABORT_WORD + 1))? })
    }

    /// Where what is combined lies, for devices.
    pub(super) fn combined(&self) -> DevicePointer {
        match &self.boxes {
            Boxes::OnDevice { combined, .. } => combined.pointer(),
            Boxes::OnHost(memory) => memory.device_pointer(),
        }
    }

    /// Where what is only gathered lies, for devices.
    pub(super) fn gathered(&self) -> DevicePointer {
        match &self.boxes {
            Boxes::OnDevice { gathered, .. } => gathered.pointer(),
            Boxes::OnHost(memory) => memory.device_pointer(),
        }
    }

    /// The outbox, for devices.
    pub(super) fn outbox(&self) -> DevicePointer {
        match &self.boxes {
            Boxes::OnDevice { outbox, .. } => outbox.pointer(),
            Boxes::OnHost(memory) => memory.device_pointer(),
        }
    }

    pub(super) fn failure_pointer(&self) -> DevicePointer {
        self.control.device_pointer()
    }

    pub(super) fn abort_pointer(&self) -> DevicePointer {
        self.control.device_pointer().add(4 * ABORT_WORD)
    }

    /// What its rank's kernels have reported.
    pub(super) fn failure(&self) -> Option<Failure> {
        let words = self.control.words();
        // The device writes the code last, with release.
        let code = words[0].load(Acquire);
        let [rank, peer, epoch] = [1, 2, 3].map(|place| words[place].load(Relaxed));
        (code != 0).then_some(Failure { code, rank, peer, epoch })
    }

    /// Ends all waits of its rank's kernels, now and later.
    pub(super) fn abort(&self) {
        self.control.words()[ABORT_WORD].store(1, Release);
    }
}

static LISTED: Mutex<BTreeMap<u64, Weak<Inbox>>> = Mutex::new(BTreeMap::new());
static NUMBER_NEXT: AtomicU64 = AtomicU64::new(0);

/// An inbox that the other threads can find, until this is dropped.
pub(super) struct Listed {
    pub(super) number: u64,
}

impl Listed {
    pub(super) fn new(inbox: &Arc<Inbox>) -> Self {
        let number = NUMBER_NEXT.fetch_add(1, Relaxed);
        list().insert(number, Arc::downgrade(inbox));
        Self { number }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        list().remove(&self.number);
    }
}

/// The inbox that another thread has listed.
pub(super) fn find(number: u64) -> Option<Arc<Inbox>> {
    list().get(&number)?.upgrade()
}

fn list() -> std::sync::MutexGuard<'static, BTreeMap<u64, Weak<Inbox>>> {
    // A panic elsewhere cannot leave the map half changed.
    LISTED.lock().unwrap_or_else(PoisonError::into_inner)
}
