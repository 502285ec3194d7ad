//! Ranks as threads, tensors in the memory of the machine, timed by the wall clock.

use std::{sync::Arc, time::Instant};

use anyhow::Result;
use half::{bf16, f16};
use paceline_comm::{Communicator, ReduceOp};
use paceline_kernels::{DType, Float, Stream, Tensor};

use super::{
    inputs::Inputs,
    place::Place,
    plan::{Case, Form},
};

/// The place of rank `rank`.
///
/// # Errors
/// If the system refuses the stream.
pub(super) fn place(rank: usize, dtype: DType, inputs: Arc<Inputs>) -> Result<Box<dyn Place>> {
    // The rank's own thread is enough: all-reduces use no other.
    let stream = Stream::host(1)?;
    Ok(match dtype {
        DType::F16 => Box::new(Host::<f16>::new(rank, stream, inputs)),
        DType::BF16 => Box::new(Host::<bf16>::new(rank, stream, inputs)),
        _ => Box::new(Host::<f32>::new(rank, stream, inputs)),
    })
}

struct Host<T> {
    rank: usize,
    stream: Stream,
    inputs: Arc<Inputs>,
    case: Option<Case>,
    /// One for each call of the independent form, one in all of the dependent form.
    tensors: Vec<Tensor>,
    /// What the tensors hold at first; that of call `k` from element `k` on.
    first: Vec<T>,
    /// What the producer before call `k` adds, from element `k` on.
    steps: Vec<T>,
}

impl<T: Float> Host<T> {
    fn new(rank: usize, stream: Stream, inputs: Arc<Inputs>) -> Self {
        Self {
            rank,
            stream,
            inputs,
            case: None,
            tensors: Vec::new(),
            first: Vec::new(),
            steps: Vec::new(),
        }
    }

    fn restore(&mut self) {
        for (call, tensor) in self.tensors.iter_mut().enumerate() {
            let elements = tensor.as_mut_slice::<T>();
            elements.copy_from_slice(&self.first[call..call + elements.len()]);
        }
    }

    fn calls(&self) -> usize {
        self.case.map_or(0, |case| case.calls)
    }
}

/// Makes an input from an output.
fn produce<T: Float>(tensor: &mut Tensor, steps: &[T]) {
    for (element, step) in tensor.as_mut_slice::<T>().iter_mut().zip(steps) {
        *element = T::from_f32(element.to_f32() + step.to_f32());
    }
}

impl<T: Float> Place for Host<T> {
    fn gpu(&self) -> Option<u32> {
        None
    }

    fn prepare(&mut self, case: &Case, _: &mut Communicator) -> Result<()> {
        self.case = Some(*case);
        let (inputs, rank) = (&self.inputs, self.rank);
        let (tensors, length) = match case.form {
            Form::Independent => (case.calls, case.count() + case.calls),
            Form::Dependent => (1, case.count()),
        };
        self.tensors = (0..tensors).map(|_| Tensor::zeros(case.dtype, &case.shape)).collect();
        (self.first, self.steps) = match case.form {
            Form::Independent => (inputs.input(rank, 0, length), Vec::new()),
            Form::Dependent => {
                (inputs.sum(0, length), inputs.step(rank, 0, case.count() + case.calls))
            }
        };
        Ok(())
    }

    fn time_producers(&mut self) -> Result<f64> {
        self.restore();
        let calls = self.calls();
        let started = Instant::now();
        for call in 0..calls {
            produce(&mut self.tensors[0], &self.steps[call..]);
        }
        Ok(started.elapsed().as_secs_f64())
    }

    fn time_calls(&mut self, communicator: &mut Communicator) -> Result<f64> {
        self.restore();
        // Ranks are let go together, once all have their inputs.
        communicator.barrier(&self.stream)?;
        let dependent = self.case.is_some_and(|case| case.form == Form::Dependent);
        let calls = self.calls();
        let started = Instant::now();
        for call in 0..calls {
            let tensor = match dependent {
                true => {
                    produce(&mut self.tensors[0], &self.steps[call..]);
                    &mut self.tensors[0]
                }
                false => &mut self.tensors[call],
            };
            communicator.all_reduce(tensor, ReduceOp::Sum, &self.stream)?;
        }
        Ok(started.elapsed().as_secs_f64())
    }

    fn wrong(&mut self) -> Result<u64> {
        let dependent = self.case.is_some_and(|case| case.form == Form::Dependent);
        let wrong = self.tensors.iter().enumerate().map(|(call, tensor)| {
            let shift = if dependent { self.calls() } else { call };
            self.inputs.wrong(tensor.as_slice::<T>(), shift)
        });
        Ok(wrong.sum())
    }
}
