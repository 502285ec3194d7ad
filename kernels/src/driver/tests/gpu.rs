//! Tests that need devices: see [`testing::gpus`].

use std::{
    ops::Range,
    os::fd::AsFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{super::testing::gpus, *};
use crate::{DType, KernelError, Stream, Tensor};

const LIMIT: Duration = Duration::from_secs(20);
const WORDS: &str = concat!(include_str!("words.ptx"), "\0");

/// The parameter of the kernels in words.ptx.
#[derive(Clone, Copy)]
#[repr(C)]
struct Words {
    address: DevicePointer,
    count: u32,
    value: u32,
}

fn kernel(device: &Device, name: &str) -> Function {
    Module::load(device, WORDS.as_bytes()).unwrap().function(name).unwrap()
}

/// Grows the first `count` words at `address` by `value`.
fn add(stream: &DeviceStream, add: &Function, address: DevicePointer, count: u32, value: u32) {
    let params = Words { address, count, value };
    // SAFETY: the kernel takes `Words`; all callers own `count` words and wait.
    unsafe { add.launch(stream, Launch::new(count.div_ceil(128), 128), &params) }.unwrap();
}

fn bytes(range: Range<usize>) -> Vec<u8> {
    range.map(|index| (index % 251) as u8).collect()
}

fn words(memory: &DeviceMemory, stream: &DeviceStream) -> Vec<u32> {
    let mut bytes = vec![0; memory.bytes()];
    memory.copy_to_host(stream, 0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn a_device_has_the_facts_that_a_topology_needs() {
    let Some(devices) = gpus(1) else { return };
    let device = &devices[0];
    assert!(!device.name().unwrap().is_empty());
    assert_ne!(device.uuid().unwrap(), [0; 16]);
    let address = device.pci_address().unwrap();
    assert_eq!(address.matches([':', '.']).count(), 3, "{address}");
    assert!(device.compute_capability() >= (7, 0));
    assert!(device.multiprocessors() > 0);
    assert!(device.shared_bytes_max().unwrap() >= 48 * 1024);
    let (free, total) = device.memory().unwrap();
    assert!(free > 0 && free <= total);
    assert!(device.can_access_peer(device).unwrap());
    device.enable_peer_access(device).unwrap();
}

#[test]
fn memory_is_zeroed_and_keeps_bytes_of_odd_counts_and_offsets() {
    let Some(devices) = gpus(1) else { return };
    let stream = DeviceStream::new(&devices[0]).unwrap();
    for size in [0, 1, 3, 257, 65_537] {
        let mut memory = DeviceMemory::zeroed(&devices[0], size).unwrap();
        let mut seen = vec![1; size];
        memory.copy_to_host(&stream, 0, &mut seen).unwrap();
        assert!(seen.iter().all(|&byte| byte == 0));
        let offset = size / 3;
        memory.copy_from_host(&stream, offset, &bytes(offset..size)).unwrap();
        memory.copy_to_host(&stream, 0, &mut seen).unwrap();
        assert!(seen[..offset].iter().all(|&byte| byte == 0));
        assert_eq!(seen[offset..], bytes(offset..size));

        memory.fill_u32(&stream, 0xA1B2_C3D4).unwrap();
        assert!(words(&memory, &stream).iter().all(|&word| word == 0xA1B2_C3D4));
        if size > 0 && size % 4 != 0 {
            memory.copy_to_host(&stream, 0, &mut seen).unwrap();
            let last = if size < 4 { offset } else { size - size % 4 };
            assert_eq!(seen[last..], bytes(last..size), "bytes after the last word changed");
        }
    }
}

#[test]
fn more_memory_than_there_is_gives_an_error_that_says_so() {
    let Some(devices) = gpus(1) else { return };
    let (_, total) = devices[0].memory().unwrap();
    let error = DeviceMemory::zeroed(&devices[0], total * 4).unwrap_err();
    assert!(matches!(error, DriverError::OutOfMemory { device: 0, .. }), "{error}");
}

#[test]
fn a_captured_copy_runs_once_for_each_launch() {
    let Some(devices) = gpus(1) else { return };
    let device = &devices[0];
    let stream = DeviceStream::new(device).unwrap();
    let kernel = kernel(device, "words_add");
    let source = DeviceMemory::zeroed(device, 4 * 37).unwrap();
    let target = DeviceMemory::zeroed(device, 4 * 37).unwrap();
    // SAFETY: both memories outlive the graph.
    let graph = unsafe {
        Graph::capture(&stream, || {
            stream.copy(target.pointer(), source.pointer(), target.bytes())?;
            add(&stream, &kernel, source.pointer(), 37, 2);
            Ok::<_, DriverError>(())
        })
    }
    .unwrap();
    stream.synchronize_within(LIMIT).unwrap();
    assert_eq!(words(&source, &stream), [0; 37], "a capture must not run");
    graph.upload(&stream).unwrap();
    for _ in 0..3 {
        graph.launch(&stream).unwrap();
    }
    assert_eq!(words(&source, &stream), [6; 37]);
    assert_eq!(words(&target, &stream), [4; 37]);
}

#[test]
fn a_capture_ends_also_when_its_work_fails_or_panics() {
    let Some(devices) = gpus(1) else { return };
    let stream = DeviceStream::new(&devices[0]).unwrap();
    // SAFETY: nothing is recorded.
    let failed = unsafe { Graph::capture(&stream, || Err(DriverError::NoDevice)) };
    assert_eq!(failed.unwrap_err(), DriverError::NoDevice);
    // SAFETY: as above.
    let panicked = catch_unwind(AssertUnwindSafe(|| unsafe {
        Graph::capture::<DriverError>(&stream, || panic!("a bug in the work"))
    }));
    assert!(panicked.is_err());
    // SAFETY: as above.
    let waited = unsafe {
        Graph::capture(&stream, || {
            let _ = stream.synchronize_within(LIMIT);
            Ok::<_, DriverError>(())
        })
    };
    assert!(matches!(waited, Err(DriverError::Call { code: 900..=908, .. })), "{waited:?}");
    stream.synchronize_within(LIMIT).unwrap();
    assert!(stream.is_idle().unwrap());
}

#[test]
fn dependent_and_cooperative_launches_run_every_thread() {
    let Some(devices) = gpus(1) else { return };
    let device = &devices[0];
    let stream = DeviceStream::new(device).unwrap();
    let count = kernel(device, "words_count");
    let memory = DeviceMemory::zeroed(device, 4).unwrap();
    let params = Words { address: memory.pointer(), count: 1000, value: 1 };
    let plain = Launch::new(8, 128);
    let cases = [
        plain,
        Launch { dependent: true, ..plain },
        Launch { cooperative: true, ..plain },
        Launch { dependent: true, shared_bytes: 60 * 1024, ..plain },
    ];
    for (index, launch) in cases.into_iter().enumerate() {
        for _ in 0..5 {
            // SAFETY: the kernel takes `Words`, adds atomically, so that launches may overlap, and
            // is waited for.
            unsafe { count.launch(&stream, launch, &params) }.unwrap();
        }
        assert_eq!(words(&memory, &stream), [5000 * (index as u32 + 1)], "{launch:?}");
    }
    assert!(count.blocks_per_multiprocessor(128, 0).unwrap() >= 8);
    let large = device.shared_bytes_max().unwrap();
    assert_eq!(count.blocks_per_multiprocessor(128, large).unwrap(), 1);
    let too_large = Launch { shared_bytes: large + 1, ..plain };
    // SAFETY: as above, if it were launched at all.
    assert!(unsafe { count.launch(&stream, too_large, &params) }.is_err());
}

#[test]
fn modules_name_what_is_missing() {
    let Some(devices) = gpus(1) else { return };
    let module = Module::load(&devices[0], WORDS.as_bytes()).unwrap();
    let error = module.function("words_divide").unwrap_err();
    assert_eq!(error, DriverError::NoFunction { device: 0, name: "words_divide".into() });
    let error = Module::load(&devices[0], &[]).unwrap_err();
    assert!(matches!(error, DriverError::BadImage { device: 0, .. }));
}

#[test]
fn a_mapping_of_an_exported_descriptor_outlives_the_exporter() {
    let Some(devices) = gpus(1) else { return };
    let device = &devices[0];
    let stream = DeviceStream::new(device).unwrap();
    let kernel = kernel(device, "words_add");
    let exporter = ExportableMemory::zeroed(device, 1_000_003, &[]).unwrap();
    assert_eq!(exporter.bytes() % vmm::granularity(device).unwrap(), 0);
    let last = exporter.bytes() - 4;
    let descriptor = exporter.export().unwrap();
    let mapping =
        ExportableMemory::import(device, descriptor.as_fd(), exporter.bytes(), &[]).unwrap();
    drop(descriptor);
    assert_ne!(mapping.pointer(), exporter.pointer());
    add(&stream, &kernel, exporter.pointer().add(last), 1, 7);
    stream.synchronize_within(LIMIT).unwrap();
    drop(exporter);
    add(&stream, &kernel, mapping.pointer().add(last), 1, 5);
    let copy = DeviceMemory::zeroed(device, 4).unwrap();
    // SAFETY: both ranges live until the copy was waited for.
    unsafe { stream.copy(copy.pointer(), mapping.pointer().add(last), 4) }.unwrap();
    assert_eq!(words(&copy, &stream), [12]);
}

#[test]
fn a_descriptor_of_something_else_is_refused() {
    let Some(devices) = gpus(1) else { return };
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = ExportableMemory::import(&devices[0], file.as_fd(), 1 << 21, &[]).unwrap_err();
    let DriverError::Call { call, .. } = error else { panic!("{error}") };
    assert_eq!(call, "cuMemImportFromShareableHandle");
}

#[test]
fn host_and_device_see_each_others_writes_in_pinned_memory() {
    let Some(devices) = gpus(1) else { return };
    let device = &devices[0];
    let stream = DeviceStream::new(device).unwrap();
    let kernel = kernel(device, "words_add");
    let pinned = PinnedMemory::zeroed(device, 4 * 101 + 1).unwrap();
    assert_eq!((pinned.bytes(), pinned.words().len()), (405, 101));
    pinned.words()[100].store(40, Ordering::Relaxed);
    pinned.write(404, &[9]);
    add(&stream, &kernel, pinned.device_pointer(), 101, 2);
    stream.synchronize_within(LIMIT).unwrap();
    assert_eq!(pinned.words()[0].load(Ordering::Acquire), 2);
    assert_eq!(pinned.words()[100].load(Ordering::Acquire), 42);
    let mut tail = [0; 5];
    pinned.read(400, &mut tail);
    assert_eq!(tail, [42, 0, 0, 0, 9]);
}

#[test]
fn a_wait_ends_at_its_limit_and_the_work_goes_on() {
    let Some(devices) = gpus(1) else { return };
    let stream = DeviceStream::new(&devices[0]).unwrap();
    let wait = kernel(&devices[0], "words_wait");
    let flag = PinnedMemory::zeroed(&devices[0], 4).unwrap();
    let params = Words { address: flag.device_pointer(), count: 20_000_000, value: 1 };
    // SAFETY: the kernel takes `Words`; the flag is freed after the stream was waited for.
    unsafe { wait.launch(&stream, Launch::new(1, 1), &params) }.unwrap();
    let limit = Duration::from_millis(2);
    let error = stream.synchronize_within(limit).unwrap_err();
    assert_eq!(error, DriverError::Timeout { device: 0, limit });
    assert!(!stream.is_idle().unwrap());
    flag.words()[0].store(1, Ordering::Release);
    stream.synchronize_within(LIMIT).unwrap();
}

#[test]
fn events_order_streams_and_tell_the_time_between() {
    let Some(devices) = gpus(1) else { return };
    let device = &devices[0];
    let streams = [(); 2].map(|()| DeviceStream::new(device).unwrap());
    let [start, end] = [(); 2].map(|()| Event::new(device).unwrap());
    let kernel = kernel(device, "words_add");
    let memory = DeviceMemory::zeroed(device, 4 << 20).unwrap();
    start.record(&streams[0]).unwrap();
    for _ in 0..20 {
        add(&streams[0], &kernel, memory.pointer(), 1 << 20, 1);
    }
    end.record(&streams[0]).unwrap();
    streams[1].wait(&end).unwrap();
    add(&streams[1], &kernel, memory.pointer(), 1 << 20, 1);
    assert!(words(&memory, &streams[1]).iter().all(|&word| word == 21));
    end.synchronize_within(LIMIT).unwrap();
    assert!(end.is_complete().unwrap());
    let seconds = end.seconds_since(&start).unwrap();
    assert!(seconds > 0.0 && seconds < LIMIT.as_secs_f64(), "{seconds}");
}

#[test]
fn peers_read_and_write_each_others_memory() {
    let Some(devices) = gpus(2) else { return };
    let (near, far) = (&devices[0], &devices[1]);
    if !near.can_access_peer(far).unwrap() {
        println!("SKIP: GPUs 0 and 1 cannot reach each other's memory");
        return;
    }
    near.enable_peer_access(far).unwrap();
    near.enable_peer_access(far).unwrap();
    let stream = DeviceStream::new(near).unwrap();
    let memory = DeviceMemory::zeroed(far, 4 * 33).unwrap();
    add(&stream, &kernel(near, "words_add"), memory.pointer(), 33, 3);
    stream.synchronize_within(LIMIT).unwrap();
    assert_eq!(words(&memory, &DeviceStream::new(far).unwrap()), [3; 33]);

    let mapped = ExportableMemory::zeroed(far, 4, &[near]).unwrap();
    add(&stream, &kernel(near, "words_add"), mapped.pointer(), 1, 8);
    let copy = DeviceMemory::zeroed(near, 4).unwrap();
    // SAFETY: both ranges live until the copy was waited for.
    unsafe { stream.copy(copy.pointer(), mapped.pointer(), 4) }.unwrap();
    assert_eq!(words(&copy, &stream), [8]);
}

#[test]
fn tensors_travel_to_a_device_and_back() {
    let Some(devices) = gpus(1) else { return };
    let stream = Stream::cuda(&devices[0]).unwrap();
    assert_eq!(stream.device(), Some(&devices[0]));
    let queue = stream.device_stream().unwrap();
    let values: Vec<f32> = (0..21).map(|value| value as f32).collect();
    let host = Tensor::from_slice(&[3, 7], &values);
    let mut tensor = Tensor::zeros_on(&devices[0], DType::F32, &[3, 7]).unwrap();
    assert_eq!(tensor.to_host(queue).unwrap().to_f32_vec(), [0.0; 21]);
    tensor.copy_from_host(&host, queue).unwrap();
    assert_eq!(tensor.device(), Some(&devices[0]));
    assert_eq!(tensor.to_host(queue).unwrap().to_f32_vec(), values);
    tensor.set_rows(2);
    assert_eq!(tensor.to_host(queue).unwrap().to_f32_vec(), values[..14]);
    let view = tensor.into_shared().slice_rows(1..2).slice_columns(2..5);
    assert_eq!(view.clone().to_host(queue).unwrap().to_f32_vec(), values[9..12]);
    stream.synchronize_within(LIMIT).unwrap();

    let mut empty = Tensor::zeros_on(&devices[0], DType::BF16, &[0, 5]).unwrap();
    empty.copy_from_host(&Tensor::zeros(DType::BF16, &[0, 5]), queue).unwrap();
    assert!(empty.to_host(queue).unwrap().is_empty());
}

#[test]
fn a_tensor_in_foreign_memory_stays_inside_it() {
    let Some(devices) = gpus(1) else { return };
    let queue = DeviceStream::new(&devices[0]).unwrap();
    let memory = Arc::new(DeviceMemory::zeroed(&devices[0], 64).unwrap());
    let make = |offset| {
        // SAFETY: nothing else writes the memory while the tensor lives.
        unsafe { Tensor::from_device_memory(DType::I32, &[2, 3], memory.clone(), offset) }
    };
    assert!(matches!(make(44), Err(KernelError::OutOfBounds { available: 64, .. })));
    let mut tensor = make(40).unwrap();
    tensor.copy_from_host(&Tensor::from_slice(&[2, 3], &[1i32; 6]), &queue).unwrap();
    assert_eq!(tensor.device_pointer(), Some(memory.pointer().add(40)));
    let sums: Vec<u32> = [vec![0; 10], vec![1; 6]].concat();
    assert_eq!(words(&memory, &queue), sums);
    assert!(catch_unwind(AssertUnwindSafe(|| tensor.reshape(&[7]))).is_err());
}

#[test]
fn misuse_of_device_tensors_and_streams_panics_with_a_reason() {
    let Some(devices) = gpus(1) else { return };
    let message = |misuse: &mut dyn FnMut()| {
        let panic = catch_unwind(AssertUnwindSafe(misuse)).unwrap_err();
        panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
            .expect("a panic with a text")
    };
    let mut tensor = Tensor::zeros_on(&devices[0], DType::F32, &[2, 2]).unwrap();
    assert!(message(&mut || drop(tensor.clone())).contains("share a device tensor"));
    assert!(message(&mut || tensor.fill_zero()).contains("lies on GPU 0"));
    assert!(message(&mut || drop(tensor.to_f32_vec())).contains("lies on GPU 0"));
    let stream = Stream::cuda(&devices[0]).unwrap();
    let host = Tensor::zeros(DType::F32, &[1, 2]);
    let operator = &mut || crate::ops::argmax::argmax(&stream, &host, &mut [0]);
    assert!(message(operator).contains("CPU operator"));
    let mut shared = tensor.into_shared();
    assert!(message(&mut || assert!(shared.device_pointer_mut().is_none())).contains("read-only"));
}
