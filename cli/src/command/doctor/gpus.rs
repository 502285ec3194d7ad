//! What the driver says of each GPU, and which GPUs reach each other.

use std::{fs, path::Path};

use paceline_kernels::driver::{self, Device, DriverError};
use serde_json::json;

use super::Finding;
use crate::output::units;

/// Each GPU that this process could use, or why there is none.
pub(super) fn gpus() -> Vec<Finding> {
    let count = driver::available().and_then(|()| Device::count());
    match count {
        Ok(count) => (0..count).map(gpu).collect(),
        Err(reason) => vec![none(&reason)],
    }
}

fn none(reason: &DriverError) -> Finding {
    // Where the kernel's part of the driver runs, what is missing is its library.
    let listed = fs::read_dir(Path::new("/proc/driver/nvidia/gpus")).map_or(0, Iterator::count);
    let found = match listed {
        0 => "none".to_owned(),
        count => format!("{count} in /proc/driver/nvidia/gpus"),
    };
    Finding::unusable("NVIDIA", found, reason.to_string())
}

fn gpu(ordinal: u32) -> Finding {
    let subject = format!("GPU {ordinal}");
    let describe = || -> driver::Result<Finding> {
        let device = Device::open(ordinal)?;
        let (name, address) = (device.name()?, device.pci_address()?);
        let ((free, total), numa) = (device.memory()?, device.numa_node());
        let (major, minor) = device.compute_capability();
        let node = numa.map_or("unknown".to_owned(), |node| node.to_string());
        let found = format!(
            "{name} at {address}, NUMA node {node}, {} ({} free), compute capability \
             {major}.{minor}",
            units::bytes(total as u64),
            units::bytes(free as u64),
        );
        Ok(Finding::usable(subject.clone(), found).with(json!({
            "name": name,
            "pci_address": address,
            "numa_node": numa,
            "memory_bytes": total,
            "memory_free_bytes": free,
            "compute_capability": format!("{major}.{minor}"),
        })))
    };
    describe().unwrap_or_else(|reason| {
        Finding::unusable(subject.clone(), "found, but not usable", reason.to_string())
    })
}

/// For each GPU, the others whose memory its kernels could use; nothing where there are fewer than
/// two.
pub(super) fn peers() -> Vec<Finding> {
    let open = || -> driver::Result<Vec<Device>> {
        driver::available()?;
        (0..Device::count()?).map(Device::open).collect()
    };
    // What stops this is a finding of `gpus` already.
    let devices = open().unwrap_or_default();
    if devices.len() < 2 {
        return Vec::new();
    }
    devices.iter().map(|device| reach(device, &devices)).collect()
}

/// A row of the matrix.
fn reach(device: &Device, devices: &[Device]) -> Finding {
    let subject = format!("GPU {}", device.ordinal());
    let reaches = |peer: &Device| Ok((peer.ordinal(), device.can_access_peer(peer)?));
    let others = devices.iter().filter(|peer| *peer != device);
    let found: Vec<(u32, bool)> = match others.map(reaches).collect::<driver::Result<_>>() {
        Ok(found) => found,
        Err(reason) => return Finding::unusable(subject, "unknown", reason.to_string()),
    };
    let [yes, no] = [true, false].map(|wanted| -> Vec<u32> {
        found.iter().filter(|(_, reaches)| *reaches == wanted).map(|(peer, _)| *peer).collect()
    });
    let list = |peers: &[u32]| peers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    let finding = match (yes.is_empty(), no.is_empty()) {
        (_, true) => Finding::usable(subject, format!("reaches {}", list(&yes))),
        (true, false) => Finding::unusable(
            subject,
            "reaches no other GPU",
            "the driver allows no peer access; data then goes through the memory of the machine",
        ),
        (false, false) => {
            let found = format!("reaches {}, but not {}", list(&yes), list(&no));
            Finding::usable(subject, found)
        }
    };
    finding.with(json!({ "reaches": yes, "does_not_reach": no }))
}
