//! Which rows of a tree a row may attend to. The invariant: a row sees its ancestors and itself and
//! nothing else, so `row(u) = row(parent of u) ∪ {u}`.

/// Bit rows of ancestor-or-self, 64 columns a word, lowest bit first.
///
/// The committed cache, which every node sees, is not part of the mask. The buffer is kept by
/// [`clear`](TreeMask::clear), so that a mask can be rebuilt each round without allocating.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeMask {
    words: Vec<u64>,
    words_per_row: usize,
    rows: usize,
}

impl TreeMask {
    /// An empty mask with room for `columns` nodes.
    pub fn with_columns(columns: usize) -> Self {
        let mut mask = Self::default();
        mask.clear(columns);
        mask
    }

    /// Rows so far: one for each node.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Words in a row.
    pub fn words_per_row(&self) -> usize {
        self.words_per_row
    }

    /// All rows, `[rows, words_per_row]`.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// One node's row.
    ///
    /// # Panics
    /// If `node` is not below [`rows`](Self::rows).
    pub fn row(&self, node: usize) -> &[u64] {
        assert!(node < self.rows, "node {node} of a mask of {} rows", self.rows);
        &self.words[node * self.words_per_row..(node + 1) * self.words_per_row]
    }

    /// Whether `node` attends to `other`.
    ///
    /// # Panics
    /// If `node` is not below [`rows`](Self::rows).
    pub fn sees(&self, node: usize, other: usize) -> bool {
        let row = self.row(node);
        other < self.rows && row[other / 64] >> (other % 64) & 1 == 1
    }

    /// The nodes that `node` attends to, ascending; the last one is `node` itself.
    ///
    /// # Panics
    /// If `node` is not below [`rows`](Self::rows).
    pub fn visible(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        self.row(node).iter().enumerate().flat_map(|(index, &word)| {
            std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)))
                .take_while(|&rest| rest != 0)
                .map(move |rest| index * 64 + rest.trailing_zeros() as usize)
        })
    }

    /// Drops all rows and makes room for `columns` nodes.
    pub fn clear(&mut self, columns: usize) {
        self.words.clear();
        self.words_per_row = columns.div_ceil(64).max(1);
        self.rows = 0;
    }

    /// Adds the row of the next node, whose parent is `parent`, and returns the node's index.
    ///
    /// # Panics
    /// If `parent` has no row yet, or the mask has no column left for the node.
    pub fn push(&mut self, parent: Option<usize>) -> usize {
        let node = self.rows;
        assert!(node < self.words_per_row * 64, "no column left for node {node}");
        match parent {
            Some(parent) => {
                assert!(parent < node, "parent {parent} of node {node} has no row yet");
                let start = parent * self.words_per_row;
                self.words.extend_from_within(start..start + self.words_per_row);
            }
            None => self.words.resize(self.words.len() + self.words_per_row, 0),
        }
        self.words[node * self.words_per_row + node / 64] |= 1 << (node % 64);
        self.rows += 1;
        node
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_its_parents_row_and_itself() {
        let mut mask = TreeMask::with_columns(4);
        for parent in [None, Some(0), Some(0), Some(1)] {
            mask.push(parent);
        }
        assert_eq!(mask.words(), [0b0001, 0b0011, 0b0101, 0b1011]);
        assert_eq!(mask.visible(3).collect::<Vec<_>>(), [0, 1, 3]);
        assert!(mask.sees(3, 1) && !mask.sees(3, 2) && !mask.sees(1, 3));
    }

    #[test]
    fn rows_span_several_words() {
        let mut mask = TreeMask::with_columns(130);
        mask.push(None);
        for node in 1..130 {
            mask.push(Some(node - 1));
        }
        assert_eq!(mask.words_per_row(), 3);
        assert_eq!(mask.visible(129).collect::<Vec<_>>(), (0..130).collect::<Vec<_>>());
        assert_eq!(mask.row(64), [u64::MAX, 1, 0]);
        mask.clear(2);
        assert_eq!((mask.rows(), mask.words_per_row()), (0, 1));
    }
}
