//! The memory that the ranks of a group share: its layout, and how it is mapped.
//!
//! One region serves threads (anonymous memory) and processes (a sealed memory file) alike.
//! It holds a header, one [`RankBlock`] a rank and two slots a rank.
//! Invariant: everything but the slots and the failure records is accessed atomically; those two
//! are plain memory whose ownership the protocol ([`crate::protocol`]) passes on.

use std::{
    cell::UnsafeCell,
    ffi::c_void,
    os::fd::{AsFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, AtomicU64},
};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
    thread::futex,
};

use crate::{CommError, Result, failure::FailureRecord};

/// Ranks in a group of the back end `host`; a set of ranks fits a 64-bit mask.
pub(crate) const WORLD_SIZE_MAX: usize = 64;
/// Bounds of a slot's size.
pub(crate) const SLOT_BYTES_MIN: usize = 4096;
pub(crate) const SLOT_BYTES_MAX: usize = 1 << 28;

const MAGIC: u64 = u64::from_le_bytes(*b"paceline");
const LAYOUT_VERSION: u32 = 1;
const PAGE: usize = 4096;

#[repr(C, align(4096))]
struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    world_size: AtomicU32,
    slot_bytes: AtomicU64,
    first_failure: AtomicU32,
}

/// What one rank publishes. The flag shares its cache line with the descriptors, so that a
/// reader that sees the flag has the descriptors too.
#[repr(C, align(4096))]
pub(crate) struct RankBlock {
    pub(crate) published: Published,
    /// How many ranks sleep on this rank's flag.
    pub(crate) sleepers: Line<AtomicU32>,
    /// One of the `STATE_` values.
    pub(crate) state: Line<AtomicU32>,
    /// What this rank saw fail: by the rank itself, and by its abort handle.
    pub(crate) failures: [UnsafeCell<FailureRecord>; 2],
}

#[repr(C, align(64))]
pub(crate) struct Published {
    /// The last step that this rank published (wraps around).
    pub(crate) flag: AtomicU32,
    /// The calls of the last two published steps, by parity of the step.
    pub(crate) descriptors: [[AtomicU64; 2]; 2],
}

#[repr(C, align(128))]
pub(crate) struct Line<T>(pub(crate) T);

pub(crate) const STATE_PRESENT: u32 = 0;
pub(crate) const STATE_LEFT: u32 = 1;
pub(crate) const STATE_PANICKED: u32 = 2;

/// Sizes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) world_size: usize,
    pub(crate) slot_bytes: usize,
}

impl Layout {
    fn slots_offset(self) -> usize {
        size_of::<Header>() + self.world_size * size_of::<RankBlock>()
    }

    /// Bytes of the whole region.
    pub(crate) fn bytes(self) -> usize {
        self.slots_offset() + 2 * self.world_size * self.slot_bytes
    }

    fn check(self) -> Result<()> {
        let fits = (1..=WORLD_SIZE_MAX).contains(&self.world_size)
            && (SLOT_BYTES_MIN..=SLOT_BYTES_MAX).contains(&self.slot_bytes)
            && self.slot_bytes.is_multiple_of(PAGE);
        if fits {
            return Ok(());
        }
        let reason = format!("{} ranks with slots of {} bytes", self.world_size, self.slot_bytes);
        Err(CommError::System { what: "laying out the shared memory", reason })
    }
}

/// A mapped region; unmapped on drop.
pub(crate) struct Region {
    base: NonNull<u8>,
    layout: Layout,
    futex_flags: futex::Flags,
}

// SAFETY: the memory is shared by design; all access follows the module's invariant.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Memory for ranks that are threads of this process.
    pub(crate) fn anonymous(layout: Layout) -> Result<Self> {
        layout.check()?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the system chooses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                layout.bytes(),
                protection,
                MapFlags::PRIVATE,
            )
        };
        let region = Self::over(base, layout, futex::Flags::PRIVATE)?;
        region.sign();
        Ok(region)
    }

    /// Memory for ranks that are processes of this machine, and the file to pass on to them.
    /// The file's size is sealed, so that no process can pull the memory from under another.
    pub(crate) fn memory_file(layout: Layout) -> Result<(Self, OwnedFd)> {
        layout.check()?;
        let what = "making a shared memory file (memfd)";
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"paceline-comm", flags)
            .map_err(|error| CommError::system(what)(error.into()))?;
        rustix::fs::ftruncate(&file, layout.bytes() as u64)
            .and_then(|()| rustix::fs::fcntl_add_seals(&file, size_seals() | SealFlags::SEAL))
            .map_err(|error| CommError::system(what)(error.into()))?;
        let region = Self::map_file(&file, layout)?;
        region.sign();
        Ok((region, file))
    }

    /// Maps the file that rank 0 made, after checking that it is what it should be.
    pub(crate) fn open(file: &OwnedFd, layout: Layout) -> Result<Self> {
        layout.check()?;
        let what = "opening rank 0's shared memory file";
        let wrong = |reason: &str| CommError::System { what, reason: reason.to_owned() };
        let size = rustix::fs::fstat(file).map_err(|error| wrong(&error.to_string()))?.st_size;
        if u64::try_from(size).ok() != Some(layout.bytes() as u64) {
            return Err(wrong(&format!("it has {size} bytes, not {}", layout.bytes())));
        }
        let seals = rustix::fs::fcntl_get_seals(file).map_err(|error| wrong(&error.to_string()))?;
        if !seals.contains(size_seals()) {
            return Err(wrong("its size is not sealed"));
        }
        let region = Self::map_file(file, layout)?;
        region.check_signature()?;
        Ok(region)
    }

    fn map_file(file: &OwnedFd, layout: Layout) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address that the system chooses; the file's size is
        // sealed, so that every page stays backed.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                layout.bytes(),
                protection,
                MapFlags::SHARED,
                file.as_fd(),
                0,
            )
        };
        Self::over(base, layout, futex::Flags::empty())
    }

    fn over(
        base: rustix::io::Result<*mut c_void>,
        layout: Layout,
        futex_flags: futex::Flags,
    ) -> Result<Self> {
        let what = "mapping the memory of a group";
        let base = base.map_err(|error| CommError::system(what)(error.into()))?;
        let base = NonNull::new(base.cast()).expect("the system never maps the null page");
        Ok(Self { base, layout, futex_flags })
    }

    fn sign(&self) {
        use std::sync::atomic::Ordering::{Relaxed, Release};
        let header = self.header();
        header.version.store(LAYOUT_VERSION, Relaxed);
        header.world_size.store(self.layout.world_size as u32, Relaxed);
        header.slot_bytes.store(self.layout.slot_bytes as u64, Relaxed);
        header.magic.store(MAGIC, Release);
    }

    fn check_signature(&self) -> Result<()> {
        use std::sync::atomic::Ordering::{Acquire, Relaxed};
        let header = self.header();
        let same = header.magic.load(Acquire) == MAGIC
            && header.version.load(Relaxed) == LAYOUT_VERSION
            && header.world_size.load(Relaxed) as usize == self.layout.world_size
            && header.slot_bytes.load(Relaxed) == self.layout.slot_bytes as u64;
        if same {
            return Ok(());
        }
        let reason = "it was laid out by another version: run the same binary on all ranks";
        Err(CommError::System {
            what: "opening rank 0's shared memory file",
            reason: reason.to_owned(),
        })
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    fn header(&self) -> &Header {
        // SAFETY: the region starts with a header, which is valid for any bytes and only has
        // atomics; the mapping lives as long as `self`.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// Which record holds the first failure of the group, plus one; 0 while there is none.
    #[inline]
    pub(crate) fn first_failure(&self) -> &AtomicU32 {
        &self.header().first_failure
    }

    /// What `rank` publishes.
    #[inline]
    pub(crate) fn block(&self, rank: usize) -> &RankBlock {
        assert!(rank < self.layout.world_size, "rank {rank} of {}", self.layout.world_size);
        // SAFETY: `world_size` blocks follow the header; they hold atomics and cells only.
        unsafe { self.base.add(size_of::<Header>()).cast::<RankBlock>().add(rank).as_ref() }
    }

    /// The start of the slot that `rank` writes in steps of the parity of `step`.
    #[inline]
    pub(crate) fn slot(&self, rank: usize, step: u32) -> NonNull<u8> {
        assert!(rank < self.layout.world_size, "rank {rank} of {}", self.layout.world_size);
        let index = 2 * rank + (step & 1) as usize;
        // SAFETY: `2 * world_size` slots follow the blocks.
        unsafe { self.base.add(self.layout.slots_offset() + index * self.layout.slot_bytes) }
    }

    /// Sleeps while the flag of `rank` is `seen`, at most for `limit`. May return early.
    pub(crate) fn sleep(&self, rank: usize, seen: u32, limit: std::time::Duration) {
        let limit = futex::Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        // Whatever the result (woken, changed, timed out, interrupted), the caller looks again.
        let _ = futex::wait(&self.block(rank).published.flag, self.futex_flags, seen, Some(&limit));
    }

    /// Wakes all that sleep on the flag of `rank`.
    pub(crate) fn wake(&self, rank: usize) {
        let flag = &self.block(rank).published.flag;
        // Waking cannot fail on mapped memory; if it did, sleepers look again by themselves.
        let _ = futex::wake(flag, self.futex_flags, i32::MAX as u32);
    }

    /// Wakes all that sleep on any flag, so that they see a failure.
    pub(crate) fn wake_all(&self) {
        (0..self.layout.world_size).for_each(|rank| self.wake(rank));
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping, and nothing borrowed from it outlives `self`.
        // A failure would leave the memory mapped, which is harmless.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.layout.bytes()) };
    }
}

fn size_seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_file_is_checked_before_use() {
        let layout = Layout { world_size: 2, slot_bytes: SLOT_BYTES_MIN };
        let (region, file) = Region::memory_file(layout).unwrap();
        // SAFETY: nobody else has the slot.
        unsafe { region.slot(1, 1).write(42) };
        let other = Region::open(&file, layout).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { other.slot(1, 1).read() }, 42);

        let larger = Layout { world_size: 3, ..layout };
        assert!(Region::open(&file, larger).is_err());
        assert!(rustix::fs::ftruncate(&file, 0).is_err(), "the size must be sealed");
        let unsealed = rustix::fs::memfd_create(c"unsealed", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, layout.bytes() as u64).unwrap();
        assert!(Region::open(&unsealed, layout).is_err());
    }

    #[test]
    fn a_published_flag_and_its_descriptors_share_a_line() {
        assert_eq!(size_of::<Published>(), 64);
        assert_eq!(size_of::<RankBlock>(), PAGE);
    }
}
