//! The controller in synthetic worlds whose costs and acceptance are known, so that its speed can
//! be compared with that of the best fixed plan.

mod random;

use paceline_spec::{Controller, ControllerOptions, Limits, Plan, RoundOutcome, TreeParameters};
use random::Random;

fn between(random: &mut Random, low: f64, high: f64) -> f64 {
    low + (high - low) * random.uniform()
}

/// Costs in milliseconds, acceptance by depth.
#[derive(Clone)]
struct World {
    name: &'static str,
    pass: Vec<(usize, f64)>,
    draft_fixed: f64,
    draft_level: f64,
    tree_level: f64,
    catch_up_row: f64,
    chain: Vec<f64>,
    tree: Vec<f64>,
}

impl World {
    fn pass_cost(&self, width: usize) -> f64 {
        let upper = self.pass.iter().position(|point| point.0 >= width);
        let upper = upper.expect("the table reaches the widest plan");
        let (w, cost) = self.pass[upper];
        if w == width {
            return cost;
        }
        let (v, below) = self.pass[upper - 1];
        below + (cost - below) * (width - v) as f64 / (w - v) as f64
    }

    fn draft_cost(&self, plan: Plan) -> f64 {
        match plan {
            Plan::Plain => 0.0,
            Plan::Chain { drafted } => self.draft_fixed + self.draft_level * drafted as f64,
            Plan::Tree(tree) => self.draft_fixed + self.tree_level * tree.depth() as f64,
        }
    }

    fn cost(&self, plan: Plan) -> f64 {
        self.pass_cost(plan.width()) + self.draft_cost(plan)
    }

    fn rate_at(&self, plan: Plan, level: usize) -> f64 {
        let rates = if matches!(plan, Plan::Tree(_)) { &self.tree } else { &self.chain };
        rates.get(level).or(rates.last()).copied().unwrap_or(0.0)
    }

    fn tokens(&self, plan: Plan) -> f64 {
        let mut reached = 1.0;
        (0..plan.depth()).fold(1.0, |tokens, level| {
            reached *= self.rate_at(plan, level);
            tokens + reached
        })
    }

    fn speed(&self, plan: Plan) -> f64 {
        self.tokens(plan) / self.cost(plan)
    }

    fn best(&self, options: &ControllerOptions) -> (Plan, f64) {
        let chains = (1..=options.chain_drafted_max).map(|drafted| Plan::Chain { drafted });
        let plans = chains.chain(options.trees.iter().copied().map(Plan::Tree));
        let plans = plans.chain([Plan::Plain]).map(|plan| (plan, self.speed(plan)));
        plans.max_by(|a, b| a.1.total_cmp(&b.1)).expect("plain is always there")
    }
}

/// A run of a controller, with measurements that are 5 % noisy and 10 times too slow now and then.
struct Run {
    controller: Controller,
    random: Random,
    limits: Limits,
    /// Rows that the draft has not seen.
    behind: usize,
}

/// Expected tokens and true milliseconds: what luck and noise leave out.
#[derive(Default, Clone, Copy)]
struct Sum {
    tokens: f64,
    cost: f64,
    plain: usize,
    changes: usize,
}

impl Run {
    fn new(options: &ControllerOptions, seed: u64) -> Self {
        let controller = Controller::new(options.clone());
        Self { controller, random: Random(seed), limits: Limits::NONE, behind: 0 }
    }

    fn rounds(&mut self, world: &World, rounds: usize) -> Sum {
        let mut sum = Sum::default();
        let mut last = None;
        for _ in 0..rounds {
            let plan = self.controller.decide(self.limits);
            let mut accepted = 0;
            while accepted < plan.depth() && self.random.uniform() < world.rate_at(plan, accepted) {
                accepted += 1;
            }
            let catch_up = if plan == Plan::Plain {
                self.behind += 1;
                0.0
            } else {
                std::mem::take(&mut self.behind) as f64 * world.catch_up_row
            };
            let noise = [self.noise(), self.noise(), self.noise()];
            self.controller.observe(&RoundOutcome {
                plan,
                width: plan.width(),
                accepted,
                draft_seconds: 1e-3 * world.draft_cost(plan) * noise[0],
                verify_seconds: 1e-3 * world.pass_cost(plan.width()) * noise[1],
                catch_up_seconds: 1e-3 * catch_up * noise[2],
                waiting_rows: self.behind,
            });
            sum.tokens += world.tokens(plan);
            sum.cost += world.cost(plan) + catch_up;
            sum.plain += usize::from(plan == Plan::Plain);
            sum.changes += usize::from(last.replace(plan).is_some_and(|last| last != plan));
        }
        sum
    }

    fn noise(&mut self) -> f64 {
        let outlier = if self.random.uniform() < 0.01 { 10.0 } else { 1.0 };
        between(&mut self.random, 0.95, 1.05) * outlier
    }
}

impl Sum {
    fn speed(&self) -> f64 {
        self.tokens / self.cost
    }
}

fn options() -> ControllerOptions {
    let tree = |topk, depth, nodes| TreeParameters::new(topk, depth, nodes).expect("valid");
    ControllerOptions { chain_drafted_max: 7, trees: vec![tree(4, 4, 16), tree(2, 3, 8)] }
}

/// A mixture model on one PCIe machine, with the draft's acceptance of real traffic.
fn mixture() -> World {
    World {
        name: "mixture",
        pass: vec![(1, 8.4), (2, 9.2), (4, 10.7), (8, 13.7), (16, 18.9)],
        draft_fixed: 0.1,
        draft_level: 0.35,
        tree_level: 0.5,
        catch_up_row: 0.02,
        chain: vec![0.645, 0.61, 0.61, 0.5],
        tree: vec![0.78, 0.72, 0.7, 0.6],
    }
}

fn worlds() -> Vec<World> {
    let base = mixture();
    vec![
        base.clone(),
        World { name: "good", chain: vec![0.9], tree: vec![0.93], ..base.clone() },
        World {
            name: "tiles",
            pass: vec![(1, 5.0), (3, 5.1), (4, 9.0), (7, 9.2), (8, 17.0), (16, 30.0)],
            chain: vec![0.75],
            tree: vec![0.8],
            ..base.clone()
        },
        World {
            name: "flat",
            pass: vec![(1, 8.0), (16, 8.8)],
            tree: vec![0.9, 0.88, 0.85, 0.85],
            ..base.clone()
        },
        World {
            name: "first token only",
            chain: vec![0.9, 0.05],
            tree: vec![0.92, 0.1],
            ..base.clone()
        },
        World { name: "useless", chain: vec![0.0], tree: vec![0.0], ..base.clone() },
        World { name: "poor", chain: vec![0.15], tree: vec![0.25], ..base.clone() },
        World { name: "tree only", chain: vec![0.02], tree: vec![0.95], ..base.clone() },
        World {
            name: "dear draft",
            draft_fixed: 6.0,
            draft_level: 3.0,
            tree_level: 5.0,
            chain: vec![0.8],
            tree: vec![0.85],
            ..base
        },
    ]
}

#[test]
fn the_steady_state_is_within_two_percent_of_the_best_fixed_plan() {
    const SEEDS: u64 = 16;
    let options = options();
    for world in worlds() {
        let (best, speed) = world.best(&options);
        let mut mean = 0.0;
        for seed in 0..SEEDS {
            let mut run = Run::new(&options, seed);
            run.rounds(&world, 1000);
            let sum = run.rounds(&world, 4000);
            let ratio = sum.speed() / speed;
            mean += ratio / SEEDS as f64;
            let name = world.name;
            assert!(ratio > 0.95, "{name}, seed {seed}: {ratio:.4} of the speed of {best:?}");
            assert!(sum.changes < 200, "{name}, seed {seed}: {} changes of plan", sum.changes);
        }
        println!("{:18} {mean:.4} of the speed of {best:?}", world.name);
        assert!(mean > 0.98, "{}: {mean:.4} of the speed of {best:?}", world.name);
    }
}

#[test]
fn random_worlds_are_learnt_too() {
    let options = options();
    let mut random = Random(7);
    let (mut mean, mut worst) = (0.0, 1.0_f64);
    const WORLDS: u64 = 150;
    for seed in 0..WORLDS {
        let world = random_world(&mut random);
        let (best, speed) = world.best(&options);
        let mut run = Run::new(&options, seed);
        run.rounds(&world, 1000);
        let ratio = run.rounds(&world, 3000).speed() / speed;
        mean += ratio / WORLDS as f64;
        worst = worst.min(ratio);
        assert!(ratio > 0.9, "world {seed}: {ratio:.4} of the speed of {best:?}");
    }
    println!("mean {mean:.4}, worst {worst:.4}");
    assert!(mean > 0.98, "{mean}");
}

fn random_world(random: &mut Random) -> World {
    let mut pass = Vec::new();
    let mut cost = 5.0;
    for width in [1, 2, 3, 4, 5, 6, 7, 8, 16] {
        pass.push((width, cost));
        let jump = if random.uniform() < 0.2 { between(random, 0.0, 2.0) } else { 0.0 };
        cost += between(random, 0.0, 1.0) + jump;
    }
    let chain = between(random, 0.0, 0.95);
    let slope = between(random, 0.8, 1.0);
    let chain: Vec<f64> = (0..7).map(|level| chain * f64::powi(slope, level)).collect();
    let gain = between(random, 0.0, 0.6);
    let tree = chain.iter().map(|rate| rate + gain * (1.0 - rate)).collect();
    World {
        name: "random",
        pass,
        draft_fixed: between(random, 0.0, 0.5),
        draft_level: between(random, 0.05, 1.0),
        tree_level: between(random, 0.1, 1.5),
        catch_up_row: between(random, 0.0, 0.05),
        chain,
        tree,
    }
}

#[test]
fn a_useless_draft_costs_less_than_three_percent() {
    let options = options();
    for (draft_level, tree_level, wide) in [(0.35, 0.5, 1.0), (1.0, 1.5, 2.0), (4.0, 6.0, 3.0)] {
        let mut world = World { draft_level, tree_level, ..mixture() };
        (world.chain, world.tree) = (vec![0.0], vec![0.0]);
        for point in &mut world.pass[1..] {
            point.1 *= wide;
        }
        for seed in 0..16 {
            let sum = Run::new(&options, seed).rounds(&world, 2000);
            let ratio = sum.speed() / world.speed(Plan::Plain);
            assert!(ratio >= 0.97, "passes {wide} times as dear, seed {seed}: {ratio:.4}");
        }
    }
}

#[test]
fn a_good_draft_is_found_within_a_hundred_rounds() {
    let options = options();
    let world = World { chain: vec![0.85], tree: vec![0.9], ..mixture() };
    let (_, speed) = world.best(&options);
    for seed in 0..16 {
        let mut run = Run::new(&options, seed);
        let first = run.rounds(&world, 100);
        assert!(first.speed() > 1.6 * world.speed(Plan::Plain), "seed {seed}: {}", first.speed());
        let next = run.rounds(&world, 200);
        assert!(next.speed() > 0.94 * speed, "seed {seed}: {}", next.speed() / speed);
    }
}

#[test]
fn a_change_of_acceptance_is_followed() {
    let options = options();
    let good = World { chain: vec![0.85], tree: vec![0.9], ..mixture() };
    let bad = World { chain: vec![0.0], tree: vec![0.0], ..mixture() };
    let (_, speed) = good.best(&options);
    const SEEDS: u64 = 32;
    let mut mean = 0.0;
    for seed in 0..SEEDS {
        let mut run = Run::new(&options, seed);
        run.rounds(&good, 1500);
        let worse = run.rounds(&bad, 150);
        let settled = run.rounds(&bad, 2000);
        let plain = bad.speed(Plan::Plain);
        assert!(worse.speed() > 0.8 * plain, "seed {seed}: {}", worse.speed() / plain);
        assert!(settled.speed() > 0.97 * plain, "seed {seed}: {}", settled.speed() / plain);
        // The longest wait between trials, the trials, and saving up for what the draft has to
        // catch up on.
        run.rounds(&good, 1200);
        let better = run.rounds(&good, 1000).speed() / speed;
        assert!(better > 0.8, "seed {seed}: {better}");
        mean += better / SEEDS as f64;
    }
    println!("{mean:.4} of the best after the change");
    assert!(mean > 0.96, "{mean}");
}

#[test]
fn a_change_of_costs_is_followed() {
    let options = options();
    let cheap = World { name: "cheap", chain: vec![0.6], tree: vec![0.7], ..mixture() };
    let mut dear = cheap.clone();
    for point in &mut dear.pass[1..] {
        point.1 *= 2.5;
    }
    const SEEDS: u64 = 32;
    let mut means = [0.0; 4];
    for seed in 0..SEEDS {
        let mut run = Run::new(&options, seed);
        let phases = [(&cheap, 1000), (&dear, 300), (&cheap, 3000), (&dear, 300)];
        for ((world, wait), mean) in phases.into_iter().zip(&mut means) {
            run.rounds(world, wait);
            let ratio = run.rounds(world, 1500).speed() / world.best(&options).1;
            *mean += ratio / SEEDS as f64;
            // Bad luck in a trial may keep a draft away for its longest wait.
            assert!(ratio > 0.85, "{} seed {seed}: {ratio:.4}", world.name);
        }
    }
    println!("{means:.4?}");
    assert!(means.iter().all(|&mean| mean > 0.975), "{means:.4?}");
}

/// Several sequences draft alike: a pass of their rows costs more with each sequence, so what pays
/// for one need not pay for many.
#[test]
fn batches_learn_from_all_their_sequences() {
    let options = options();
    for (sequences, row_cost, drafts) in [(1, 0.25, true), (8, 0.02, true), (8, 2.0, false)] {
        let (mut controller, mut random) = (Controller::new(options.clone()), Random(11));
        // A pass costs 5 ms and so much for each row of each sequence.
        let pass = |plan: Plan| 5.0 + row_cost * (plan.width() * sequences) as f64;
        let draft = |plan: Plan| 0.05 * (plan.depth() * sequences) as f64;
        let (mut tokens, mut cost, mut drafting) = (0.0, 0.0, 0);
        for _ in 0..3000 {
            let plan = controller.decide(Limits::NONE);
            let mut accepted = vec![0; sequences];
            for count in &mut accepted {
                while *count < plan.depth() && random.uniform() < 0.6 {
                    *count += 1;
                }
            }
            tokens += accepted.iter().map(|&count| count as f64 + 1.0).sum::<f64>();
            cost += pass(plan) + draft(plan);
            drafting += usize::from(plan != Plan::Plain);
            let outcome = RoundOutcome {
                plan,
                width: plan.width(),
                accepted: 0,
                draft_seconds: 1e-3 * draft(plan),
                verify_seconds: 1e-3 * pass(plan) * between(&mut random, 0.95, 1.05),
                catch_up_seconds: 0.0,
                waiting_rows: 0,
            };
            controller.observe_batch(&outcome, &accepted);
        }
        let plain = sequences as f64 / pass(Plan::Plain);
        let gain = tokens / cost / plain;
        println!("{sequences} sequences, {row_cost} ms a row: {gain:.3} of plain, {drafting}");
        match drafts {
            true => assert!(gain > 1.5 && drafting > 2500, "{sequences}: {gain} {drafting}"),
            false => assert!(gain > 0.97 && drafting < 300, "{sequences}: {gain} {drafting}"),
        }
    }
}

#[test]
fn limits_are_kept_and_decisions_repeat() {
    let options = options();
    let world = World { chain: vec![0.9], tree: vec![0.95], ..mixture() };
    let mut random = Random(3);
    let mut runs = [Run::new(&options, 1), Run::new(&options, 1)];
    for round in 0..3000 {
        let limits = Limits { depth_max: random.below(9), width_max: random.below(20) };
        let plans = runs.each_mut().map(|run| run.controller.decide(limits));
        assert_eq!(plans[0], plans[1]);
        let plan = plans[0];
        let room = plan == Plan::Plain
            || plan.depth() <= limits.depth_max && plan.width() <= limits.width_max;
        assert!(room, "round {round}: {plan:?} in {limits:?}");
        assert_eq!(runs[0].controller.decide(limits), plan, "asking twice changes nothing");
        for run in &mut runs {
            let accepted = (0..plan.depth()).take_while(|_| run.random.uniform() < 0.9).count();
            run.controller.observe(&RoundOutcome {
                plan,
                width: plan.width(),
                accepted,
                draft_seconds: world.draft_cost(plan),
                verify_seconds: world.pass_cost(plan.width()),
                catch_up_seconds: 0.0,
                waiting_rows: 0,
            });
        }
    }
    let drafting = (0..200).filter(|_| {
        runs[0].controller.decide(Limits { depth_max: 2, width_max: 3 })
            == Plan::Chain { drafted: 2 }
    });
    assert!(drafting.count() > 100, "short chains are used where longer ones do not fit");
}

#[test]
fn tight_limits_do_not_stop_drafting() {
    let options = options();
    let world = World { chain: vec![0.9], tree: vec![0.95], ..mixture() };
    let mut run = Run::new(&options, 4);
    run.limits = Limits { depth_max: 2, width_max: 3 };
    run.rounds(&world, 300);
    let ratio = run.rounds(&world, 1000).speed() / world.speed(Plan::Chain { drafted: 2 });
    assert!(ratio > 0.97, "{ratio}");
}

#[test]
fn senseless_measurements_do_no_harm() {
    let options = options();
    let world = World { chain: vec![0.8], tree: vec![0.8], ..mixture() };
    let mut run = Run::new(&options, 5);
    for seconds in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
        for _ in 0..50 {
            let plan = run.controller.decide(Limits::NONE);
            run.controller.observe(&RoundOutcome {
                plan,
                width: plan.width(),
                accepted: usize::MAX,
                draft_seconds: seconds,
                verify_seconds: seconds,
                catch_up_seconds: seconds,
                waiting_rows: 0,
            });
        }
    }
    run.rounds(&world, 1000);
    let ratio = run.rounds(&world, 1000).speed() / world.best(&options).1;
    assert!(ratio > 0.95, "{ratio}");
}

#[test]
fn without_a_draft_there_is_nothing_to_choose() {
    let options = ControllerOptions { chain_drafted_max: 0, trees: Vec::new() };
    let sum = Run::new(&options, 0).rounds(&mixture(), 100);
    assert_eq!(sum.plain, 100);
}

/// A processor whose passes grow by half for each row, where drafting hardly pays at best. The
/// answers of one short run must not pay for finding that out.
#[test]
fn a_short_answer_costs_little_where_nothing_pays() {
    const SEEDS: u64 = 64;
    let options = ControllerOptions {
        chain_drafted_max: 15,
        trees: [(2, 4, 8), (4, 4, 15)]
            .map(|(topk, depth, nodes)| TreeParameters::new(topk, depth, nodes).expect("valid"))
            .to_vec(),
    };
    let pass = [(1, 0.7), (2, 0.87), (3, 1.13), (4, 1.4), (5, 1.7), (8, 2.48), (16, 4.8)];
    let fast = World {
        name: "rows cost a third",
        pass: pass.to_vec(),
        draft_fixed: 0.0,
        draft_level: 0.13,
        tree_level: 0.19,
        catch_up_row: 0.035,
        chain: vec![0.65, 0.65, 0.62, 0.6],
        tree: vec![0.82, 0.8, 0.78, 0.75],
    };
    let mut slow = World { name: "rows cost two thirds", ..fast.clone() };
    slow.pass = vec![(1, 0.81), (2, 1.35), (4, 2.37), (8, 4.5), (16, 8.6)];
    let useless = World { name: "useless", chain: vec![0.0], tree: vec![0.0], ..slow.clone() };
    for world in [fast, slow, useless] {
        let (best, speed) = world.best(&options);
        let ratios =
            (0..SEEDS).map(|seed| Run::new(&options, seed).rounds(&world, 220).speed() / speed);
        let mean = ratios.sum::<f64>() / SEEDS as f64;
        println!("{:22} {mean:.4} of the speed of {best:?}", world.name);
        assert!(mean > 0.97, "{}: {mean:.4} of {best:?}", world.name);
    }
}
