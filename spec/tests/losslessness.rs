//! Sampled speculation has the law of plain sampling: chi-square tests of the joint distribution of
//! the first tokens emitted, on a random Markov chain as the target. The same test must reject
//! verifiers with planted bugs, or it would prove nothing.

mod chi_square;
mod random;

use chi_square::p_value;
use paceline_spec::{
    Acceptance, Distribution, DraftTree, ProbabilityRows, SpecError, TokenId, accept_sampled,
    accept_sampled_chain,
};
use random::Random;

const VOCABULARY: usize = 6;
/// Tokens whose joint distribution is tested: 6^3 = 216 cells.
const TOKENS: usize = 3;
const DRAWS: usize = 200_000;
const P_MIN: f64 = 1e-4;

/// A target whose next token depends on the last one: one row of probabilities for each token. Some
/// are 0, as after top-k.
struct Markov {
    rows: Vec<Vec<f32>>,
}

impl Markov {
    fn new(seed: u64, zeros: f64) -> Self {
        let mut random = Random(seed);
        let mut row = |_| loop {
            let weight = |random: &mut Random| {
                if random.uniform() < zeros { 0.0 } else { -random.uniform().ln() }
            };
            let weights: Vec<f64> = (0..VOCABULARY).map(|_| weight(&mut random)).collect();
            let sum: f64 = weights.iter().sum();
            if sum > 0.0 {
                return weights.iter().map(|weight| (weight / sum) as f32).collect();
            }
        };
        Self { rows: (0..VOCABULARY).map(&mut row).collect() }
    }

    /// Probability of each sequence of [`TOKENS`] tokens after `root`.
    fn joint(&self, root: TokenId) -> Vec<f64> {
        let mut joint = vec![1.0];
        for step in 0..TOKENS {
            let extend = |(cell, &probability): (usize, &f64)| {
                let last = if step == 0 { root as usize } else { cell % VOCABULARY };
                let row = &self.rows[last];
                row.iter().map(move |&next| probability * f64::from(next)).collect::<Vec<_>>()
            };
            joint = joint.iter().enumerate().flat_map(extend).collect();
        }
        joint
    }
}

/// Rows for the nodes of a tree, dense or sparse.
struct Rows<'a> {
    tree: &'a DraftTree,
    markov: &'a Markov,
    sparse: Option<(Vec<TokenId>, Vec<f32>)>,
}

impl<'a> Rows<'a> {
    fn new(tree: &'a DraftTree, markov: &'a Markov, sparse: bool) -> Self {
        Self { tree, markov, sparse: sparse.then(Default::default) }
    }
}

impl ProbabilityRows for Rows<'_> {
    type Error = SpecError;

    fn row(&mut self, node: usize) -> Result<Distribution<'_>, SpecError> {
        let row = &self.markov.rows[self.tree.tokens()[node] as usize];
        let Some((tokens, probabilities)) = &mut self.sparse else {
            return Ok(Distribution::dense(row));
        };
        tokens.clear();
        probabilities.clear();
        for (token, &probability) in row.iter().enumerate().filter(|entry| *entry.1 > 0.0) {
            tokens.push(token as TokenId);
            probabilities.push(probability);
        }
        Distribution::sparse(tokens, probabilities)
    }
}

/// Runs rounds until [`TOKENS`] tokens are out, many times, and tests their joint distribution.
fn p_of(
    markov: &Markov,
    seed: u64,
    mut round: impl FnMut(TokenId, &mut Random) -> Acceptance,
) -> f64 {
    const ROOT: TokenId = 0;
    let mut random = Random(seed);
    let mut counts = vec![0_u64; VOCABULARY.pow(TOKENS as u32)];
    for _ in 0..DRAWS {
        let mut emitted = vec![ROOT];
        while emitted.len() <= TOKENS {
            let root = *emitted.last().expect("the root is there");
            emitted.extend(round(root, &mut random).emitted);
        }
        let cell =
            emitted[1..=TOKENS].iter().fold(0, |cell, &token| cell * VOCABULARY + token as usize);
        counts[cell] += 1;
    }
    p_value(&counts, &markov.joint(ROOT))
}

/// Drafts that depend on the root alone: nothing random, as the rule for deterministic drafts
/// wants.
fn trees(seed: u64, chain: bool) -> Vec<DraftTree> {
    let mut random = Random(seed);
    (0..VOCABULARY as TokenId)
        .map(|root| {
            let mut tree = DraftTree::root_only(root);
            let nodes = if chain { 4 } else { 9 };
            while tree.len() < nodes {
                let below = if chain { tree.len() } else { tree.len().min(5) };
                let parent = if chain { below - 1 } else { random.below(below) };
                // A token that the parent has as a child already is refused, and drawn again.
                let _ = tree.push(parent, random.below(VOCABULARY) as TokenId);
            }
            tree
        })
        .collect()
}

type Rule = fn(&DraftTree, &mut Rows<'_>, &mut dyn FnMut() -> f64) -> Acceptance;

fn p_of_deterministic(seed: u64, chain: bool, sparse: bool, rule: Rule) -> f64 {
    let markov = Markov::new(seed, 0.25);
    let trees = trees(seed + 100, chain);
    p_of(&markov, seed, |root, random| {
        let tree = &trees[root as usize];
        rule(tree, &mut Rows::new(tree, &markov, sparse), &mut || random.uniform())
    })
}

fn the_rule(
    tree: &DraftTree,
    rows: &mut Rows<'_>,
    mut coin: &mut dyn FnMut() -> f64,
) -> Acceptance {
    accept_sampled(tree, rows, &mut coin).expect("the rows are valid")
}

/// How a verifier can go wrong.
#[derive(Clone, Copy, PartialEq)]
enum Bug {
    None,
    /// Rejected children keep their mass in the residual.
    ResidualNotZeroed,
    /// The coin that rejected the children chooses the bonus token too.
    SameCoin,
    /// Each child is compared with its own probability instead of the running sum.
    NotCumulative,
    /// A fresh coin for each child, without renormalising after a rejection.
    NotRenormalised,
}

/// A verifier of our own for deterministic drafts, with a bug on demand.
fn planted(
    tree: &DraftTree,
    rows: &mut Rows<'_>,
    coin: &mut dyn FnMut() -> f64,
    bug: Bug,
) -> Acceptance {
    let (mut path, mut emitted, mut node) = (vec![0], Vec::new(), 0);
    loop {
        let mut row = rows.markov.rows[tree.tokens()[node] as usize].clone();
        let mut draw = coin();
        let mut below = 0.0;
        let accepted = tree.children(node).find(|&child| {
            let probability = f64::from(row[tree.tokens()[child] as usize]);
            below = if bug == Bug::NotCumulative { probability } else { below + probability };
            if bug == Bug::NotRenormalised {
                (below, draw) = (probability, coin());
            }
            draw < below
        });
        if let Some(child) = accepted {
            emitted.push(tree.tokens()[child]);
            path.push(child);
            node = child;
            continue;
        }
        if bug != Bug::ResidualNotZeroed {
            tree.children(node).for_each(|child| row[tree.tokens()[child] as usize] = 0.0);
        }
        let draw = if bug == Bug::SameCoin { draw } else { coin() };
        let bonus = Distribution::dense(&row).sample(draw).expect("some mass is left");
        emitted.push(bonus);
        return Acceptance { path, emitted };
    }
}

#[test]
fn deterministic_drafts_leave_the_law_unchanged() {
    for chain in [true, false] {
        for (seed, sparse) in [(1, false), (2, true)] {
            let p = p_of_deterministic(seed, chain, sparse, the_rule);
            println!("chain {chain}, sparse {sparse}, seed {seed}: p {p:.4}");
            assert!(p > P_MIN, "chain {chain}, sparse {sparse}, seed {seed}: p {p:e}");
        }
    }
}

#[test]
fn planted_bugs_are_found() {
    let sound = p_of_deterministic(1, false, false, |t, r, c| planted(t, r, c, Bug::None));
    assert!(sound > P_MIN, "the verifier that bugs are planted in is sound without: p {sound:e}");
    let bugs: [(&str, Rule); 4] = [
        ("residual not zeroed", |t, r, c| planted(t, r, c, Bug::ResidualNotZeroed)),
        ("same coin", |t, r, c| planted(t, r, c, Bug::SameCoin)),
        ("not cumulative", |t, r, c| planted(t, r, c, Bug::NotCumulative)),
        ("not renormalised", |t, r, c| planted(t, r, c, Bug::NotRenormalised)),
    ];
    for (name, rule) in bugs {
        let p = p_of_deterministic(1, false, false, rule);
        println!("{name}: p {p:e}");
        assert!(p < 1e-9, "{name} went unnoticed: p {p:e}");
    }
}

/// How a verifier of sampled chains can go wrong.
#[derive(Clone, Copy, PartialEq)]
enum ChainBug {
    /// The crate's own rule.
    None,
    /// The verifier that bugs are planted in, without any.
    Absent,
    /// The bonus after a rejection is sampled from p, not from the excess of p over q.
    NoResidual,
    /// Acceptance with probability p(x) instead of p(x)/q(x).
    NotDivided,
    /// The proposal given is not the one that the draft sampled from.
    WrongProposal,
}

fn p_of_sampled_chain(seed: u64, bug: ChainBug) -> f64 {
    let target = Markov::new(seed, 0.25);
    let draft = Markov::new(seed + 50, 0.3);
    let claimed = Markov::new(seed + 60, 0.0);
    p_of(&target, seed, |root, random| {
        let mut chain = DraftTree::root_only(root);
        for node in 0..3 {
            let row = Distribution::dense(&draft.rows[chain.tokens()[node] as usize]);
            let token = row.sample(random.uniform()).expect("rows add up to 1");
            chain.push(node, token).expect("a chain has no siblings");
        }
        let claimed = if bug == ChainBug::WrongProposal { &claimed } else { &draft };
        let sparse = seed.is_multiple_of(2);
        let mut p = Rows::new(&chain, &target, sparse);
        let mut q = Rows::new(&chain, claimed, !sparse);
        let mut coin = || random.uniform();
        if matches!(bug, ChainBug::None | ChainBug::WrongProposal) {
            return accept_sampled_chain(&chain, &mut p, &mut q, &mut coin).expect("valid rows");
        }
        planted_chain(&chain, &target, &draft, &mut coin, bug)
    })
}

fn planted_chain(
    chain: &DraftTree,
    target: &Markov,
    draft: &Markov,
    coin: &mut dyn FnMut() -> f64,
    bug: ChainBug,
) -> Acceptance {
    let tokens = chain.tokens();
    let (mut path, mut emitted) = (vec![0], Vec::new());
    for node in 0..chain.len() {
        let p = Distribution::dense(&target.rows[tokens[node] as usize]);
        let q = Distribution::dense(&draft.rows[tokens[node] as usize]);
        if let Some(&token) = tokens.get(node + 1) {
            let divisor = if bug == ChainBug::NotDivided { 1.0 } else { q.probability(token) };
            if coin() * f64::from(divisor) < f64::from(p.probability(token)) {
                path.push(node + 1);
                emitted.push(token);
                continue;
            }
        }
        let residual = (node + 1 < chain.len() && bug != ChainBug::NoResidual)
            .then(|| p.sample_excess(&q, coin()))
            .flatten();
        emitted.push(residual.unwrap_or_else(|| p.sample(coin()).expect("rows add up to 1")));
        break;
    }
    Acceptance { path, emitted }
}

#[test]
fn sampled_chains_leave_the_law_unchanged() {
    for seed in 1..=2 {
        let p = p_of_sampled_chain(seed, ChainBug::None);
        println!("seed {seed}: p {p:.4}");
        assert!(p > P_MIN, "seed {seed}: p {p:e}");
    }
}

#[test]
fn planted_bugs_in_the_chain_rule_are_found() {
    let sound = p_of_sampled_chain(1, ChainBug::Absent);
    assert!(sound > P_MIN, "the verifier that bugs are planted in is sound without: p {sound:e}");
    let bugs = [
        ("no residual", ChainBug::NoResidual),
        ("not divided", ChainBug::NotDivided),
        ("wrong proposal", ChainBug::WrongProposal),
    ];
    for (name, bug) in bugs {
        let p = p_of_sampled_chain(1, bug);
        println!("{name}: p {p:e}");
        assert!(p < 1e-9, "{name} went unnoticed: p {p:e}");
    }
}
