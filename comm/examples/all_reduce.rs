//! Sums a tensor over ranks, checks the sum, and prints the time that it takes for some sizes.
//!
//! ```text
//! cargo run --release --example all_reduce -- --threads 2
//! cargo run --release --example all_reduce -- --processes 4
//! torchrun --nproc-per-node 2 --no-python target/release/examples/all_reduce
//! ```
//!
//! Columns as those of nccl-tests: time is the median of a call, algbw is bytes by time, busbw is
//! algbw times 2 (ranks - 1) / ranks.

use std::{
    error::Error,
    process::{Child, Command, ExitCode},
    time::{Duration, Instant},
};

use paceline_comm::{
    Collective, Communicator, GroupOptions, InitMethod, InitOptions, ReduceOp, in_process,
    init_distributed,
};
use paceline_kernels::{DType, Stream, Tensor};

const USAGE: &str = "usage: all_reduce [--threads N | --processes N]; without arguments it is one \
                     rank under torchrun or srun";
const BYTES: [usize; 7] = [1 << 10, 4 << 10, 14 << 10, 56 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Each size is measured for about this long.
const TIME_A_SIZE: Duration = Duration::from_millis(100);

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["--threads", count] => count.parse().map_err(Into::into).and_then(threads),
        ["--processes", count] => count.parse().map_err(Into::into).and_then(processes),
        [] => one_rank(),
        _ => Err(USAGE.into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Ranks as threads of this process.
fn threads(count: usize) -> Outcome {
    let groups = in_process(count, &GroupOptions::default())?;
    std::thread::scope(|scope| {
        let start = |group| scope.spawn(|| measure(Communicator::connect(group, None)?));
        let ranks: Vec<_> = groups.into_iter().map(start).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked")?)
    })
}

/// Ranks as processes that run this program again, and meet over a file.
fn processes(count: usize) -> Outcome {
    let meeting = std::env::temp_dir().join(format!("all_reduce-{}", std::process::id()));
    let program = std::env::current_exe()?;
    let start = |rank: usize| {
        Command::new(&program)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", count.to_string())
            .env("ALL_REDUCE_METHOD", format!("file://{}", meeting.display()))
            .spawn()
    };
    let children: Vec<Child> = (0..count).map(start).collect::<Result<_, _>>()?;
    for mut child in children {
        if !child.wait()?.success() {
            return Err("a rank failed; its error is above".into());
        }
    }
    Ok(())
}

/// This process as one rank, by its environment.
fn one_rank() -> Outcome {
    let method = std::env::var("ALL_REDUCE_METHOD");
    let method = InitMethod::parse(method.as_deref().unwrap_or("env://"))?;
    measure(init_distributed(&InitOptions::new(method))?)
}

fn measure(mut comm: Communicator) -> Outcome {
    let stream = Stream::host(1)?;
    let (rank, world) = (comm.rank().index(), comm.world_size());
    if rank == 0 {
        println!("# {}; bf16, sum; {}", comm.topology(), backend(&comm)?);
        println!("{:>10} {:>10} {:>10} {:>10} {:>6}", "bytes", "us", "algbw", "busbw", "wrong");
    }
    for bytes in BYTES {
        let length = bytes / DType::BF16.bytes();
        let ones = vec![half::bf16::from_f32((rank + 1) as f32); length];
        let mut x = Tensor::from_slice(&[1, length], &ones);
        comm.all_reduce(&mut x, ReduceOp::Sum, &stream)?;
        let expected = (world * (world + 1) / 2) as f32;
        let wrong = x.to_f32_vec().iter().filter(|&&value| value != expected).count();
        let mut zeros = Tensor::zeros(DType::BF16, &[1, length]);
        let mut times = Vec::new();
        let rounds = rounds(&mut comm, &mut zeros, &stream)?;
        for _ in 0..rounds {
            let start = Instant::now();
            comm.all_reduce(&mut zeros, ReduceOp::Sum, &stream)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        let seconds = times[times.len() / 2];
        if rank == 0 {
            let algbw = bytes as f64 / seconds / 1e9;
            let busbw = algbw * 2.0 * (world - 1) as f64 / world as f64;
            let us = seconds * 1e6;
            println!("{bytes:>10} {us:>10.2} {algbw:>10.2} {busbw:>10.2} {wrong:>6}");
        }
    }
    Ok(())
}

fn backend(comm: &Communicator) -> Result<String, paceline_comm::CommError> {
    let choice = comm.backend_for(Collective::AllReduce, DType::BF16, BYTES[0])?;
    Ok(choice.to_string())
}

/// Rank 0 tries ten calls and tells the others how many fill the time.
fn rounds(
    comm: &mut Communicator,
    x: &mut Tensor,
    stream: &Stream,
) -> Result<u64, paceline_comm::CommError> {
    let start = Instant::now();
    for _ in 0..10 {
        comm.all_reduce(x, ReduceOp::Sum, stream)?;
    }
    let rounds = 10.0 * TIME_A_SIZE.as_secs_f64() / start.elapsed().as_secs_f64().max(1e-7);
    let mut message = (rounds.clamp(10.0, 100_000.0) as u64).to_le_bytes().to_vec();
    comm.broadcast_bytes(&mut message, paceline_comm::Rank(0))?;
    Ok(message.try_into().map_or(10, u64::from_le_bytes))
}
