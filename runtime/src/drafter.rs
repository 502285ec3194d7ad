//! Drafting on rank 0: keeps the draft network's cache in step with the target, and grows chains
//! and trees with it.
//!
//! Row i of the draft pairs the target's captured state of position i with the token of i + 1.
//! Invariant: rows 0..`rows` of the draft's cache were made from true states of committed tokens;
//! what drafting writes beyond them is scratch. Committed states wait in `pending` until the next
//! time something is drafted, so that a round without drafting costs the draft nothing.

use paceline_kernels::{
    DType, Stream, Tensor,
    ops::{
        attention::Paths,
        cache::{copy_rows, gather_rows, move_slots},
    },
};
use paceline_model::{
    eagle3::draft::{Draft, DraftPass, DraftStates},
    pass::Segment,
};
use paceline_spec::{Candidate, DraftTree, Plan, TreeBuilder, TreeParameters, top_k_log_softmax};

use crate::error::Result;

/// Waiting states take at most this much memory, or one pass's worth.
const PENDING_BYTES_MAX: usize = 64 << 20;

/// The draft network of a sequence.
pub(crate) struct Drafter {
    draft: Draft,
    stream: Stream,
    cache: Tensor,
    rows_max: usize,
    /// Committed rows of the draft's cache.
    rows: usize,
    pending: Pending,
    /// Working memory.
    batch: Tensor,
    candidates: Vec<Candidate>,
    level: Vec<Candidate>,
    chain: Vec<u32>,
    builder: Option<TreeBuilder>,
    paths: Paths,
    numbers: Numbers,
    all_rows: Vec<u32>,
}

/// States that the draft has not seen, and the token after each.
struct Pending {
    states: Tensor,
    tokens: Vec<u32>,
    capacity: usize,
}

/// Lists of one pass.
#[derive(Default)]
struct Numbers {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    parents: Vec<u32>,
}

impl Drafter {
    /// A drafter with a cache of `slots` rows. `rows_max` is the most rows of one pass of `draft`,
    /// `positions_max` the longest sequence.
    pub(crate) fn new(
        draft: Draft,
        stream: Stream,
        dtype: DType,
        slots: usize,
        rows_max: usize,
        positions_max: usize,
    ) -> Self {
        let width = draft.config().captured_states * draft.config().target_hidden;
        let affordable = PENDING_BYTES_MAX / (width * dtype.bytes());
        let capacity = positions_max.min(affordable.max(rows_max));
        Self {
            cache: draft.cache(slots),
            pending: Pending {
                states: Tensor::zeros(dtype, &[capacity, width]),
                tokens: Vec::with_capacity(capacity),
                capacity,
            },
            batch: Tensor::zeros(dtype, &[rows_max, width]),
            draft,
            stream,
            rows_max,
            rows: 0,
            candidates: Vec::new(),
            level: Vec::new(),
            chain: Vec::new(),
            builder: None,
            paths: Paths::default(),
            numbers: Numbers::default(),
            all_rows: Vec::new(),
        }
    }

    /// Starts a new sequence.
    pub(crate) fn reset(&mut self) {
        self.rows = 0;
        self.pending.tokens.clear();
    }

    /// Rows that wait.
    pub(crate) fn pending(&self) -> usize {
        self.pending.tokens.len()
    }

    /// Longest sequence that the draft was made for.
    pub(crate) fn positions_max(&self) -> usize {
        self.draft.config().positions_max
    }

    /// Number of tokens that the draft can propose.
    pub(crate) fn proposable_tokens(&self) -> usize {
        self.draft.config().draft_vocabulary
    }

    /// Takes the captured states of committed rows (`rows` of `taps`) and the token after each.
    /// `slots` are those of the sequence, used if the waiting states must be worked off.
    pub(crate) fn commit(&mut self, taps: &Tensor, rows: &[u32], tokens: &[u32], slots: &[u32]) {
        assert_eq!(rows.len(), tokens.len());
        // Beyond its positions the draft is of no use any more, so nothing is kept for it.
        if self.rows + self.pending.tokens.len() + rows.len() > self.positions_max() {
            return;
        }
        let mut done = 0;
        while done < rows.len() {
            if self.pending.tokens.len() == self.pending.capacity {
                self.extend(slots, false);
            }
            let count = (rows.len() - done).min(self.pending.capacity - self.pending.tokens.len());
            self.pending.push(taps, &rows[done..done + count], &tokens[done..done + count]);
            done += count;
        }
    }

    /// Works off the waiting rows but the last, whose logits the next draft starts from.
    pub(crate) fn catch_up(&mut self, slots: &[u32]) {
        let waiting = self.pending.tokens.len();
        if waiting > 1 {
            let last = (waiting - 1) as u32;
            let token = self.pending.tokens[waiting - 1];
            self.pending.tokens.truncate(waiting - 1);
            self.extend(slots, false);
            self.pending.keep(last, token);
        }
    }

    /// Drafts what `plan` says below the last committed token, into `tree`.
    ///
    /// # Errors
    /// If the draft's logits are not finite.
    pub(crate) fn propose(
        &mut self,
        plan: Plan,
        root: u32,
        slots: &[u32],
        tree: &mut DraftTree,
    ) -> Result<()> {
        match plan {
            Plan::Plain => tree.reset(root),
            Plan::Chain { drafted } => self.propose_chain(drafted, root, slots, tree)?,
            Plan::Tree(parameters) => self.propose_tree(parameters, root, slots, tree)?,
        }
        Ok(())
    }

    /// Runs the draft over all waiting rows. With `logits`, the last row's logits are computed.
    /// Returns the index of the last row in the last pass.
    fn extend(&mut self, slots: &[u32], logits: bool) -> u32 {
        let total = self.pending.tokens.len();
        let mut start = 0;
        let mut last = 0;
        while start < total {
            let end = (start + self.rows_max).min(total);
            self.numbers.positions.clear();
            self.numbers.positions.extend((self.rows as u32..).take(end - start));
            self.numbers.parents.clear();
            self.numbers.parents.extend(start as u32..end as u32);
            self.batch.set_rows(end - start);
            gather_rows(&self.pending.states, &self.numbers.parents, 0, &mut self.batch);
            last = (end - start - 1) as u32;
            let logit_rows: &[u32] = if logits && end == total { &[last] } else { &[] };
            let pass = DraftPass {
                tokens: &self.pending.tokens[start..end],
                states: DraftStates::Captured(&self.batch),
                positions: &self.numbers.positions,
                segment: segment(end - start, self.rows, slots),
                logit_rows,
            };
            self.draft.forward(&self.stream, &pass, &mut self.cache);
            self.rows += end - start;
            start = end;
        }
        self.pending.tokens.clear();
        last
    }

    fn propose_chain(
        &mut self,
        drafted: usize,
        root: u32,
        slots: &[u32],
        tree: &mut DraftTree,
    ) -> Result<()> {
        let mut state = self.extend(slots, true);
        self.chain.clear();
        tree.reset(root);
        for step in 0..drafted {
            if step > 0 {
                let row = self.rows + step - 1;
                let pass = DraftPass {
                    tokens: &self.chain[step - 1..],
                    states: DraftStates::Recurrent(&[state]),
                    positions: &[row as u32],
                    segment: segment(1, row, slots),
                    logit_rows: &[0],
                };
                self.draft.forward(&self.stream, &pass, &mut self.cache);
                state = 0;
            }
            top_k_log_softmax(self.draft.logits().as_slice(), 1, &mut self.candidates)?;
            let token = self.draft.target_token(self.candidates[0].token);
            self.chain.push(token);
            tree.push(step, token)?;
        }
        Ok(())
    }

    fn propose_tree(
        &mut self,
        parameters: TreeParameters,
        root: u32,
        slots: &[u32],
        tree: &mut DraftTree,
    ) -> Result<()> {
        let last = self.extend(slots, true);
        self.level.clear();
        self.add_best(0, parameters.topk())?;
        let mut builder = match self.builder.take() {
            Some(mut builder) => {
                builder.restart(parameters, root, &self.level)?;
                builder
            }
            None => TreeBuilder::start(parameters, root, &self.level)?,
        };
        self.paths.clear();
        while !builder.frontier().is_empty() {
            self.feed_frontier(&builder, last, slots);
            self.level.clear();
            for row in 0..builder.frontier().len() {
                self.add_best(row, parameters.topk())?;
            }
            builder.expand(&self.level)?;
        }
        builder.finish_into(tree);
        self.builder = Some(builder);
        Ok(())
    }

    /// Runs the draft over the nodes that a tree grows from next. Fed node i has scratch row i.
    fn feed_frontier(&mut self, builder: &TreeBuilder, last: u32, slots: &[u32]) {
        let (frontier, fed_before) = (builder.frontier(), builder.frontier_start());
        let Numbers { tokens, positions, parents } = &mut self.numbers;
        tokens.clear();
        positions.clear();
        parents.clear();
        // The rows of the pass before this one are the nodes fed last.
        let previous = builder.fed()[..fed_before].iter().rev();
        let depth = frontier[0].depth;
        let previous = fed_before - previous.take_while(|node| node.depth + 1 == depth).count();
        for node in frontier {
            tokens.push(node.token);
            positions.push(self.rows as u32 + node.depth - 1);
            parents.push(node.parent.map_or(last, |parent| (parent - previous) as u32));
            self.paths.push(node.parent);
        }
        let segment = Segment {
            earlier: fed_before,
            paths: Some(&self.paths),
            ..segment(tokens.len(), self.rows, slots)
        };
        self.all_rows.clear();
        self.all_rows.extend(0..tokens.len() as u32);
        let pass = DraftPass {
            tokens,
            states: DraftStates::Recurrent(parents),
            positions,
            segment,
            logit_rows: &self.all_rows,
        };
        self.draft.forward(&self.stream, &pass, &mut self.cache);
    }

    /// Appends the best tokens of a row of logits to `level`, as ids of the target.
    fn add_best(&mut self, row: usize, count: usize) -> Result<()> {
        let width = self.draft.logits().width();
        let logits = &self.draft.logits().as_slice::<f32>()[row * width..(row + 1) * width];
        top_k_log_softmax(logits, count, &mut self.candidates)?;
        let to_target = |candidate: &Candidate| Candidate {
            token: self.draft.target_token(candidate.token),
            ..*candidate
        };
        self.level.extend(self.candidates.iter().map(to_target));
        Ok(())
    }
}

impl Pending {
    /// Makes row `row` the only one, with its token.
    fn keep(&mut self, row: u32, token: u32) {
        move_slots(&mut self.states, &[(row, 0)]);
        self.tokens.clear();
        self.tokens.push(token);
    }

    fn push(&mut self, taps: &Tensor, rows: &[u32], tokens: &[u32]) {
        let first = self.tokens.len() as u32;
        let places = first..first + rows.len() as u32;
        copy_rows(taps, rows, &mut self.states, places);
        self.tokens.extend_from_slice(tokens);
    }
}

/// Rows in a chain after `context` committed ones.
fn segment(rows: usize, context: usize, slots: &[u32]) -> Segment<'_> {
    Segment { first_row: 0, rows, context, earlier: 0, slots, paths: None }
}
