//! Options that a run accepts and that change nothing in it, or not what one would think: a line
//! each, so that nobody wonders. Pure; the number of cores is an argument.

use crate::args::{RunArguments, SamplingArguments, SpecArgument, SpeculationArguments};

/// About ranks and threads, for a run over `ranks` ranks on `cores` cores.
pub(crate) fn of_machine(arguments: &RunArguments, ranks: usize, cores: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let single = [
        ("--expert-parallel", arguments.model.expert_parallel),
        ("--processes", arguments.distributed.processes),
    ];
    for (option, _) in single.iter().filter(|(_, given)| *given && ranks == 1) {
        lines.push(format!("warning: {option} changes nothing with one rank; add --tp N"));
    }
    if let Some(threads) = arguments.engine.threads.filter(|&threads| usize::from(threads) > cores)
    {
        lines.push(format!(
            "warning: --threads {threads}, but this process may use {cores} cores; more threads \
             than cores wait for each other"
        ));
    }
    lines
}

/// About how tokens are drawn.
pub(crate) fn of_sampling(
    arguments: &SamplingArguments,
    speculation: &SpeculationArguments,
) -> Vec<String> {
    let mut lines = Vec::new();
    if arguments.temperature == 0.0 {
        let options = [
            ("--top-k", arguments.top_k != 0),
            ("--top-p", arguments.top_p != 1.0),
            ("--min-p", arguments.min_p != 0.0),
            ("--seed", arguments.seed.is_some()),
        ];
        let given = options.iter().filter(|(_, given)| *given).map(|(option, _)| *option);
        let given: Vec<&str> = given.collect();
        if !given.is_empty() {
            lines.push(format!(
                "warning: at --temperature 0 (the default) the likeliest token is always taken: \
                 without effect: {}",
                given.join(", ")
            ));
        }
    } else if arguments.seed.is_some() && speculation.spec == Some(SpecArgument::Auto) {
        lines.push(
            "warning: --seed does not repeat a run with --spec auto, which follows the clock; \
             take another --spec, or leave it out"
                .to_owned(),
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command};

    fn lines(arguments: &str, ranks: usize) -> Vec<String> {
        let words = ["paceline", "generate"].into_iter().chain(arguments.split_whitespace());
        let Command::Generate(arguments) = Arguments::parse_from(words).command else {
            unreachable!("generate was asked for")
        };
        let machine = of_machine(&arguments.run, ranks, 4);
        let sampling = of_sampling(&arguments.sampling, &arguments.speculation);
        machine.into_iter().chain(sampling).collect()
    }

    #[test]
    fn what_changes_nothing_is_named_and_nothing_else() {
        let silent = [
            ("", 1),
            ("--processes --expert-parallel --tp 2", 2),
            ("--threads 4", 1),
            ("--temperature 1 --top-k 4 --seed 1", 1),
            ("--temperature 1 --spec auto", 1),
        ];
        for (arguments, ranks) in silent {
            assert_eq!(lines(arguments, ranks), [""; 0], "{arguments}");
        }
        let cases = [
            ("--processes", "--processes"),
            ("--tp 1 --expert-parallel", "--expert-parallel"),
            ("--threads 5", "4 cores"),
            ("--top-k 4 --seed 1", "--top-k, --seed"),
            ("--top-p 0.5 --min-p 0.1", "--top-p, --min-p"),
            ("--temperature 1 --seed 1 --spec auto", "--spec auto"),
        ];
        for (arguments, named) in cases {
            let lines = lines(arguments, 1);
            assert!(lines.len() == 1 && lines[0].contains(named), "{arguments}: {lines:?}");
        }
    }
}
