//! Ranks as threads, each with a stream on a GPU, timed by the device's events.
//!
//! All calls run twice in a row, and the second time counts: the first lets the ranks meet on the
//! device, and gives the host time to enqueue the second. Start reading at [`Devices`].

use std::{marker::PhantomData, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use half::{bf16, f16};
use paceline_comm::{AddRmsNorm, Communicator, ReduceOp};
use paceline_kernels::{
    DType, Float, Stream, Tensor,
    driver::{
        self, Device, DeviceMemory, DevicePointer, DeviceStream, Event, Function, Graph, Launch,
        Module,
    },
};

use super::{
    inputs::Inputs,
    place::Place,
    plan::{Case, Form, Plan},
};
use crate::args::ModeArgument;

/// Kernels `produce_<dtype>`, as text that every driver compiles.
const PRODUCE: &str = concat!(include_str!("produce.ptx"), "\0");
/// Threads of a block of theirs, and most blocks on a multiprocessor.
const THREADS: u32 = 256;
const BLOCKS_MAX: u32 = 8;
/// Added to the mean square by fused calls.
const EPSILON: f32 = 1e-6;
/// Bytes of the inputs of the independent form: few enough for a GPU's cache, as in a model, whose
/// activations are in there; at least two inputs, so that what a call leaves behind shows.
const INPUT_BYTES: usize = 2 << 20;
/// What outputs hold at first: NaN in every type.
const UNWRITTEN: u32 = 0x7fff_7fff;
/// Tensors begin at multiples of this, as allocations do.
const ALIGNMENT: usize = 256;

/// The GPUs of the ranks.
pub(super) struct Devices {
    /// By ordinal.
    devices: Vec<Device>,
    world: usize,
}

impl Devices {
    /// One GPU a rank; with `virtual_ranks` there may be fewer, which the ranks then share in turn.
    ///
    /// # Errors
    /// Without a driver, or with too few GPUs.
    pub(super) fn open(world: usize, virtual_ranks: bool) -> Result<Self> {
        driver::available().context("--device cuda")?;
        let count = Device::count()? as usize;
        ensure!(
            virtual_ranks || count >= world,
            "{world} ranks need {world} GPUs, but there are {count}: lower --world, or put several \
             ranks on a GPU with --virtual-ranks"
        );
        let ordinals = 0..count.min(world) as u32;
        let devices = ordinals.map(Device::open).collect::<driver::Result<_>>()?;
        Ok(Self { devices, world })
    }

    /// Whether several ranks are on one GPU.
    pub(super) fn are_shared(&self) -> bool {
        self.devices.len() < self.world
    }

    /// Each GPU's name and address.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        let name = |device: &Device| Ok(format!("{} ({})", device.name()?, device.pci_address()?));
        self.devices.iter().map(name).collect()
    }

    /// The place of rank `rank`.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn place(
        &self,
        rank: usize,
        plan: &Plan,
        inputs: Arc<Inputs>,
    ) -> Result<Box<dyn Place>> {
        let device = &self.devices[rank % self.devices.len()];
        Ok(match plan.cases[0].dtype {
            DType::F16 => Box::new(OnDevice::<f16>::new(rank, device, plan, inputs)?),
            DType::BF16 => Box::new(OnDevice::<bf16>::new(rank, device, plan, inputs)?),
            _ => Box::new(OnDevice::<f32>::new(rank, device, plan, inputs)?),
        })
    }
}

struct OnDevice<T> {
    rank: usize,
    stream: Stream,
    produce: Function,
    start: Event,
    end: Event,
    mode: ModeArgument,
    fused: bool,
    timeout: Duration,
    inputs: Arc<Inputs>,
    prepared: Option<Prepared>,
    elements: PhantomData<T>,
}

/// A case's memory and graphs. The graphs use the memory, so they are dropped first.
struct Prepared {
    all: Option<Graph>,
    producers: Option<Graph>,
    case: Case,
    /// Inputs of the independent form, which calls read in turn; one, in and out, of the dependent
    /// form.
    tensors: Vec<Tensor>,
    /// Where they lie, [`pitch`] apart.
    memory: Arc<DeviceMemory>,
    /// What `memory` holds at first.
    first: DeviceMemory,
    /// What the producer before call `k` adds, from element `k` on.
    steps: DeviceMemory,
    /// Of the independent form, an output for each input.
    outputs: Option<Outputs>,
    fused: Option<Fused>,
}

struct Outputs {
    tensors: Vec<Tensor>,
    memory: Arc<DeviceMemory>,
}

/// What fused calls take besides their inputs, which are then left as they are.
struct Fused {
    /// One for each call, zeros at first.
    residuals: Vec<Tensor>,
    memory: Arc<DeviceMemory>,
    zeros: DeviceMemory,
    weight: Tensor,
    out: Tensor,
}

/// The parameter of the kernels in produce.ptx.
#[derive(Clone, Copy)]
#[repr(C)]
struct ProduceParameters {
    x: DevicePointer,
    steps: DevicePointer,
    count: u64,
}

/// Bytes from one tensor to the next.
fn pitch(case: &Case) -> usize {
    case.bytes().next_multiple_of(ALIGNMENT)
}

/// Tensors of zeroed memory, [`pitch`] apart.
fn cut(memory: &Arc<DeviceMemory>, case: &Case, count: usize) -> Result<Vec<Tensor>> {
    let tensor = |call| {
        // SAFETY: zeroed memory of which each tensor has its own part; besides them only `restore`
        // writes it, on the stream of all that uses the tensors.
        unsafe {
            let offset = call * pitch(case);
            Tensor::from_device_memory(case.dtype, &case.shape, memory.clone(), offset)
        }
    };
    Ok((0..count).map(tensor).collect::<Result<_, _>>()?)
}

impl<T: Float> OnDevice<T> {
    fn new(rank: usize, device: &Device, plan: &Plan, inputs: Arc<Inputs>) -> Result<Self> {
        let module = Module::load(device, PRODUCE.as_bytes())?;
        Ok(Self {
            rank,
            stream: Stream::cuda(device)?,
            produce: module.function(&format!("produce_{}", T::DTYPE))?,
            start: Event::new(device)?,
            end: Event::new(device)?,
            mode: plan.mode,
            fused: plan.fused,
            timeout: plan.timeout,
            inputs,
            prepared: None,
            elements: PhantomData,
        })
    }

    fn queue(&self) -> &DeviceStream {
        self.stream.device_stream().expect("the stream was made on a device")
    }

    fn allocate(&self, case: &Case) -> Result<Prepared> {
        let (queue, bytes, count) = (self.queue(), case.bytes(), case.count());
        let device = queue.device();
        let tensors = match case.form {
            Form::Independent => (INPUT_BYTES / bytes.max(1)).clamp(2, 128).min(case.calls),
            Form::Dependent => 1,
        };
        let memory = Arc::new(DeviceMemory::zeroed(device, tensors * pitch(case))?);
        let mut first = DeviceMemory::zeroed(device, tensors * pitch(case))?;
        let values: Vec<T> = match case.form {
            Form::Independent => self.inputs.input(self.rank, 0, count + tensors),
            Form::Dependent => self.inputs.sum(0, count),
        };
        for call in 0..tensors {
            let values = bytemuck::cast_slice(&values[call..call + count]);
            first.copy_from_host(queue, call * pitch(case), values)?;
        }
        let steps = match case.form {
            Form::Independent => DeviceMemory::zeroed(device, 0)?,
            Form::Dependent => {
                let values: Vec<T> = self.inputs.step(self.rank, 0, count + case.calls);
                let mut steps = DeviceMemory::zeroed(device, size_of_val(&values[..]))?;
                steps.copy_from_host(queue, 0, bytemuck::cast_slice(&values))?;
                steps
            }
        };
        debug_assert!(bytes <= pitch(case));
        let fused = self.fused.then(|| self.allocate_fused(case)).transpose()?;
        let has_outputs = case.form == Form::Independent && !self.fused;
        let outputs = has_outputs.then(|| -> Result<_> {
            let memory = Arc::new(DeviceMemory::zeroed(device, tensors * pitch(case))?);
            Ok(Outputs { tensors: cut(&memory, case, tensors)?, memory })
        });
        let outputs = outputs.transpose()?;
        let tensors = cut(&memory, case, tensors)?;
        Ok(Prepared {
            all: None,
            producers: None,
            case: *case,
            tensors,
            memory,
            first,
            steps,
            outputs,
            fused,
        })
    }

    fn allocate_fused(&self, case: &Case) -> Result<Fused> {
        let device = self.queue().device();
        let memory = Arc::new(DeviceMemory::zeroed(device, case.calls * pitch(case))?);
        let residuals = cut(&memory, case, case.calls)?;
        let ones = Tensor::from_slice(&[case.shape[1]], &vec![T::from_f32(1.0); case.shape[1]]);
        let mut weight = Tensor::zeros_on(device, case.dtype, ones.shape())?;
        weight.copy_from_host(&ones, self.queue())?;
        let out = Tensor::zeros_on(device, case.dtype, &case.shape)?;
        let zeros = DeviceMemory::zeroed(device, memory.bytes())?;
        Ok(Fused { residuals, memory, zeros, weight, out })
    }

    /// Enqueues the making of all inputs, each followed by its call if there is a communicator.
    fn enqueue(
        &self,
        prepared: &mut Prepared,
        mut communicator: Option<&mut Communicator>,
    ) -> Result<()> {
        let Prepared { case, tensors, steps, outputs, fused, .. } = prepared;
        for call in 0..case.calls {
            let turn = call % tensors.len();
            let tensor = match case.form {
                Form::Independent => &mut tensors[turn],
                Form::Dependent => {
                    self.enqueue_producer(case, &mut tensors[0], steps, call)?;
                    &mut tensors[0]
                }
            };
            let Some(communicator) = &mut communicator else { continue };
            match (&mut *fused, &mut *outputs) {
                (None, None) => communicator.all_reduce(tensor, ReduceOp::Sum, &self.stream)?,
                (None, Some(outputs)) => {
                    let out = &mut outputs.tensors[turn];
                    communicator.all_reduce_into(tensor, out, ReduceOp::Sum, &self.stream)?;
                }
                (Some(Fused { residuals, weight, out, .. }), _) => {
                    let residual = &mut residuals[call];
                    let call = AddRmsNorm { x: tensor, residual, weight, epsilon: EPSILON, out };
                    communicator.all_reduce_add_rms_norm(call, &self.stream)?;
                }
            }
        }
        Ok(())
    }

    fn enqueue_producer(
        &self,
        case: &Case,
        tensor: &mut Tensor,
        steps: &DeviceMemory,
        call: usize,
    ) -> Result<()> {
        let params = ProduceParameters {
            x: tensor.device_pointer_mut().expect("the tensor was made on a device"),
            steps: steps.pointer().add(call * case.dtype.bytes()),
            count: case.count() as u64,
        };
        let blocks_max = self.queue().device().multiprocessors() * BLOCKS_MAX;
        let blocks = u32::try_from(case.count().div_ceil(THREADS as usize)).unwrap_or(u32::MAX);
        let launch = Launch::new(blocks.clamp(1, blocks_max), THREADS);
        // SAFETY: the kernel takes these parameters; tensor and steps live in `Prepared` as long as
        // graphs with them, hold `count` and `calls` more elements, and are used on one stream.
        Ok(unsafe { self.produce.launch(self.queue(), launch, &params) }?)
    }

    /// Records what [`OnDevice::enqueue`] does, and brings it to the device.
    fn capture(
        &self,
        prepared: &mut Prepared,
        communicator: Option<&mut Communicator>,
    ) -> Result<Graph> {
        // SAFETY: the memory lies in `Prepared`, which drops its graphs first; the stream is the
        // one that everything runs on, and stays as long as this place.
        let graph = unsafe {
            Graph::capture::<anyhow::Error>(self.queue(), || self.enqueue(prepared, communicator))
        }?;
        graph.upload(self.queue())?;
        self.queue().synchronize_within(self.timeout)?;
        Ok(graph)
    }

    /// Seconds that `work`, which enqueues it, takes on the device the second time in a row.
    fn time(
        &self,
        prepared: &mut Prepared,
        mut work: impl FnMut(&mut Prepared) -> Result<()>,
    ) -> Result<f64> {
        self.restore(prepared)?;
        work(prepared)?;
        self.restore(prepared)?;
        self.start.record(self.queue())?;
        work(prepared)?;
        self.end.record(self.queue())?;
        self.end.synchronize_within(self.timeout)?;
        Ok(self.end.seconds_since(&self.start)?)
    }

    /// Enqueues that the tensors have their first contents.
    fn restore(&self, prepared: &Prepared) -> Result<()> {
        let Prepared { memory, first, outputs, fused, .. } = prepared;
        if let Some(Outputs { memory, .. }) = outputs {
            // SAFETY: as many words as the memory has, which lives as below.
            unsafe { self.queue().fill_u32(memory.pointer(), UNWRITTEN, memory.bytes() / 4) }?;
        }
        let residuals = fused.as_ref().map(|fused| (&fused.memory, &fused.zeros));
        for (to, from) in [(memory, first)].into_iter().chain(residuals) {
            // SAFETY: both have as many bytes and live until the queue was waited for, at the end
            // of `time`; if that fails, freeing them waits for the device.
            unsafe { self.queue().copy(to.pointer(), from.pointer(), from.bytes()) }?;
        }
        Ok(())
    }

    /// Lends the prepared case and takes it back.
    fn with<R>(&mut self, work: impl FnOnce(&Self, &mut Prepared) -> Result<R>) -> Result<R> {
        let mut prepared = self.prepared.take().context("no case is prepared")?;
        let result = work(self, &mut prepared);
        self.prepared = Some(prepared);
        result
    }
}

impl<T: Float> Place for OnDevice<T> {
    fn gpu(&self) -> Option<u32> {
        Some(self.queue().device().ordinal())
    }

    fn prepare(&mut self, case: &Case, communicator: &mut Communicator) -> Result<()> {
        // The case before is freed first.
        self.prepared = None;
        let mut prepared = self.allocate(case)?;
        if self.mode == ModeArgument::Graph {
            if case.form == Form::Dependent {
                prepared.producers = Some(self.capture(&mut prepared, None)?);
            }
            prepared.all = Some(self.capture(&mut prepared, Some(communicator))?);
        }
        self.prepared = Some(prepared);
        Ok(())
    }

    fn time_producers(&mut self) -> Result<f64> {
        self.with(|place, prepared| {
            place.time(prepared, |prepared| match &prepared.producers {
                Some(graph) => Ok(graph.launch(place.queue())?),
                None => place.enqueue(prepared, None),
            })
        })
    }

    fn time_calls(&mut self, communicator: &mut Communicator) -> Result<f64> {
        self.with(|place, prepared| {
            let seconds = place.time(prepared, |prepared| match &prepared.all {
                Some(graph) => Ok(graph.launch(place.queue())?),
                None => place.enqueue(prepared, Some(communicator)),
            })?;
            communicator.check()?;
            Ok(seconds)
        })
    }

    fn wrong(&mut self) -> Result<u64> {
        self.with(|place, prepared| {
            let Prepared { case, tensors, memory, outputs, fused, .. } = prepared;
            let (memory, count) = match (fused, outputs) {
                (Some(fused), _) => (&fused.memory, case.calls),
                (None, Some(outputs)) => (&outputs.memory, tensors.len()),
                (None, None) => (&*memory, 1),
            };
            let mut found = vec![T::from_f32(0.0); case.count()];
            let mut wrong = 0;
            for call in 0..count {
                let bytes = bytemuck::cast_slice_mut(&mut found);
                memory.copy_to_host(place.queue(), call * pitch(case), bytes)?;
                let shift = match case.form {
                    Form::Dependent => case.calls,
                    Form::Independent => call % tensors.len(),
                };
                wrong += place.inputs.wrong(&found, shift);
            }
            Ok(wrong)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_devices_there_is_a_reason() {
        // On a machine with GPUs there is none.
        if driver::available().is_err() {
            let reason = Devices::open(2, true).err().map(|error| format!("{error:#}"));
            assert!(reason.is_some_and(|text| text.starts_with("--device cuda: ")));
        }
    }

    mod gpu {
        use super::*;
        use crate::command::bench::all_reduce::plan::Plan;

        /// The producers turn a sum into the next input, in every type.
        fn produce<T: Float>(devices: &Devices) {
            let inputs = Arc::new(Inputs::new(2));
            let case =
                Case { form: Form::Dependent, shape: [1, 100_003], dtype: T::DTYPE, calls: 1 };
            let plan = Plan {
                world: 2,
                mode: ModeArgument::Graph,
                fused: false,
                host_staged: false,
                cases: vec![case],
                warm_up: 0,
                repetitions: 1,
                timeout: Duration::from_secs(20),
            };
            let mut place =
                OnDevice::<T>::new(1, &devices.devices[0], &plan, inputs.clone()).unwrap();
            let mut prepared = place.allocate(&case).unwrap();
            prepared.producers = Some(place.capture(&mut prepared, None).unwrap());
            place.prepared = Some(prepared);
            assert!(place.time_producers().unwrap() > 0.0);
            let mut found = vec![T::from_f32(0.0); case.count()];
            let memory = &place.prepared.as_ref().unwrap().memory;
            memory.copy_to_host(place.queue(), 0, bytemuck::cast_slice_mut(&mut found)).unwrap();
            let expected: Vec<T> = inputs.input(1, 1, case.count());
            let differs = found.iter().zip(&expected).position(|(a, b)| a.to_f32() != b.to_f32());
            assert_eq!(differs, None);
        }

        #[test]
        fn producers_make_the_next_input() {
            let Some(devices) = driver::testing::gpus(1) else { return };
            let devices = Devices { devices, world: 2 };
            produce::<f32>(&devices);
            produce::<f16>(&devices);
            produce::<bf16>(&devices);
        }
    }
}
